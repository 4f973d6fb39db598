"""An adapter leads back to the base beside which it was trained, and to no other."""

import pytest

from qarl_trl.export.adapter_base import base_of, cache_beside_base, forget_base, name_base


@pytest.fixture
def adapter(tmp_path):
    """The folder of an adapter."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["base", "../base"])
def test_a_base_is_a_folder_beside_the_adapter(tmp_path, adapter, name):
    name_base(adapter, name, "v2", tmp_path)

    with pytest.raises(FileNotFoundError, match="is missing"):
        base_of(adapter)

    (adapter / name).mkdir()
    assert base_of(adapter) == (str(adapter / name), None)


def test_a_base_is_a_repository_whatever_its_name(tmp_path, adapter):
    name_base(adapter, "org/base", "v2", tmp_path)

    assert base_of(adapter) == ("org/base", "v2")


@pytest.mark.parametrize("cache", [None, "fp8_e5m2"])
def test_the_cache_of_a_run_is_beside_its_frozen_base_until_another_adapter_comes(tmp_path, adapter, cache):
    name_base(adapter, "org/base", None, tmp_path, cache)
    assert cache_beside_base(adapter) == cache

    forget_base(adapter)
    assert not (adapter / "base_config.json").exists()
