"""Windows of versions: what is inside of its window is accepted."""

import pytest

from qarl_trl._compat import versions


# Those whose private parts we use.
PACKAGES = ("trl", "compressed-tensors", "vllm", "peft")


def window_of(package: str):
    """The versions that the project accepts, and the lowest of them."""
    window = versions.requirements()[package].specifier
    lowest = next(bound.version for bound in window if bound.operator == ">=")
    return window, lowest


@pytest.mark.parametrize("package", PACKAGES)
# A local build, as torch's CPU index names its wheels, counts as its release.
@pytest.mark.parametrize("suffix", ["", "+cpu"])
def test_the_lowest_version_of_the_window_is_accepted(monkeypatch, package, suffix):
    _, lowest = window_of(package)
    monkeypatch.setattr(versions, "installed_version", lambda name: lowest + suffix)

    versions.check_versions(package)


@pytest.mark.parametrize("package", PACKAGES)
# Below and above every window.
@pytest.mark.parametrize("version", ["0.0.1", "99.0"])
def test_a_version_outside_its_window_is_refused(monkeypatch, package, version):
    window, _ = window_of(package)
    monkeypatch.setattr(versions, "installed_version", lambda name: version)

    with pytest.raises(ImportError) as error:
        versions.check_versions(package)

    # What is installed, and the command that mends it.
    assert f"{package} {version} is installed" in str(error.value)
    assert f"pip install '{package}{window}'" in str(error.value)
