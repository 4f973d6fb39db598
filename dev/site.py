"""Hooks of mkdocs.yml: what a page that reads well on GitHub lacks on the site. Standard library only."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError


ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> Any:
    """The repository is named once, in pyproject.toml."""
    config.repo_url = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links into the repository become links to it."""

    def link(match: re.Match[str]) -> str:
        path, anchor = match[1].rstrip("/"), match[2] or ""
        if not (ROOT / path).exists():
            raise PluginError(f"docs/{page.file.src_uri} links to {path}, which is not in the repository.")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path}{anchor})"

    return re.sub(r"\]\(\.\./([^)#]+)(#[^)]*)?\)", link, markdown)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Code in docstrings and in tables; a page that shows private methods stops the build."""
    private = re.search(r'id="([\w.]+\._[a-z]\w*)"', content)
    if private is not None:
        raise PluginError(f"docs/{page.file.src_uri} shows {private[1]}: give its class `inherited_members: false`.")

    # In docstrings a name of code stands in brackets, [`like_this`], as in TRL's.
    content = re.sub(r"\[<code>~?([^<]*)</code>\]", r"<code>\1</code>", content)
    return re.sub(r"<td.*?</td>", narrow_cell, content, flags=re.DOTALL)


def narrow_cell(cell: re.Match[str]) -> str:
    """A cell of a table for a phone: code may break after "_", "/" and ".", but no figure before its error."""

    def breakable(code: re.Match[str]) -> str:
        return re.sub(r"(?<=\w)([_/.])(?=\w)", r"\1<wbr>", code[0])

    text = cell[0].replace(" ± ", "\u00a0±\u00a0")
    return re.sub(r"<code>[^<]*</code>", breakable, text)
