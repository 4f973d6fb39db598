"""What learner and server state of themselves."""

from qarl_trl.rollout.server.facts import digest_of_sources


def test_each_change_of_a_source_makes_another_revision(tmp_path):
    folder = tmp_path / "rollout"
    folder.mkdir()
    module = folder / "worker.py"
    module.write_text("rate = 1\n")
    first = digest_of_sources(tmp_path)

    # What runs and reads leave behind is no source.
    (folder / "worker.pyc").write_bytes(b"compiled")
    assert digest_of_sources(tmp_path) == first

    module.write_text("rate = 2\n")
    edited = digest_of_sources(tmp_path)
    module.write_text("rate = 1\n")
    module.rename(folder / "workers.py")
    renamed = digest_of_sources(tmp_path)

    assert len({first, edited, renamed}) == 3
