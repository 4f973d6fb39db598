"""`qarl_trl.rollout.server.key`: a key is found by its owner, and refused if others may know it."""

import stat

import pytest

from qarl_trl.rollout.server.key import KEY, find_key, key_file, make_key


def test_a_made_key_is_its_owners_alone_and_found_by_a_trainer_of_the_same_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(KEY, raising=False)
    folder = str(tmp_path / "syncs")
    # Control: there is no key before one is made.
    assert find_key(folder) == ""

    key = make_key(folder)

    assert len(key) == 32
    # Whoever starts the server may have to tell it to trainers on other machines.
    assert key in capsys.readouterr().out
    assert stat.S_IMODE(key_file(folder).stat().st_mode) == 0o600
    assert find_key(folder) == key

    # The environment goes before the file.
    monkeypatch.setenv(KEY, "chosen")
    assert find_key(folder) == "chosen"


# Read or written by everybody, read by everybody or by the group, and only written by everybody.
@pytest.mark.parametrize("mode", [0o666, 0o644, 0o640, 0o602])
def test_a_key_that_others_may_have_made_or_read_is_refused(tmp_path, monkeypatch, mode):
    monkeypatch.delenv(KEY, raising=False)
    folder = tmp_path / "syncs"
    key_file(folder).write_text("planted")
    # After the write, because the umask would cut the mode off.
    key_file(folder).chmod(mode)

    with pytest.raises(PermissionError, match=rf"syncs.key must be a file of this user .*mode {mode:04o}.*{KEY}"):
        find_key(folder)

    key_file(folder).chmod(0o600)
    assert find_key(folder) == "planted"  # control


def test_a_key_of_another_user_or_of_another_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    folder = tmp_path / "syncs"
    mine = tmp_path / "mine"
    mine.write_text("private")
    mine.chmod(0o600)

    # A link would send the content of any file of this user to whoever serves.
    key_file(folder).symlink_to(mine)
    with pytest.raises(PermissionError, match="cannot be read as the key"):
        find_key(folder)

    key_file(folder).unlink()
    mine.rename(key_file(folder))
    # Nobody but root can give a file away, so the test becomes another user instead.
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(PermissionError, match=r"this user \(uid 12345\)"):
        find_key(folder)
