"""What pyproject.toml cannot say: how README.md is shown on PyPI, and how the source archive is written."""

import re
import tarfile
import tomllib
from pathlib import Path

from setuptools import setup


def absolute(text: str, repository: str) -> str:
    """`text` with the targets of its relative links below `repository`, those of pictures as raw files."""
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\g<1>{repository}/raw/main/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{repository}/blob/main/", text)


if __name__ == "__main__":
    here = Path(__file__).parent
    urls = tomllib.loads((here / "pyproject.toml").read_text())["project"]["urls"]
    # There README.md has no files beside it, so its links lead into the repository.
    readme = absolute((here / "README.md").read_text(), urls["Repository"])
    # The same format without extended headers: the fractions of each file's seconds would be 2 % of the archive.
    tarfile.TarFile.format = tarfile.USTAR_FORMAT
    setup(long_description=readme, long_description_content_type="text/markdown")
