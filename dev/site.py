"""Hooks of mkdocs.yml: what a page that reads well on GitHub lacks on the site. Standard library only."""

from __future__ import annotations

import ast
import html
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
    """
    Links into the repository become links to it, and `<!-- fields: file class -->` becomes a table of that dataclass.
    """

    def link(match: re.Match[str]) -> str:
        path, anchor = match[1].rstrip("/"), match[2] or ""
        if not (ROOT / path).exists():
            raise PluginError(f"docs/{page.file.src_uri} links to {path}, which is not in the repository.")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path}{anchor})"

    markdown = re.sub(r"\]\(\.\./([^)#]+)(#[^)]*)?\)", link, markdown)
    return re.sub(r"<!-- fields: (\S+) (\S+) -->", lambda match: fields_table(ROOT / match[1], match[2]), markdown)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """In docstrings a name of code stands in brackets, [`like_this`], as in TRL's."""
    return re.sub(r"\[<code>~?([^<]*)</code>\]", r"<code>\1</code>", content)


def fields_table(path: Path, name: str) -> str:
    """
    Fields of a dataclass with type, default and help, as an HTML table, read from the source without importing it.
    """
    tree = ast.parse(path.read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    rows = []
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            told = {part.arg: part.value for part in node.value.keywords}
            factory = told.get("default_factory")
            default = ast.unparse(factory.body if isinstance(factory, ast.Lambda) else told["default"])
            meaning = re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(ast.literal_eval(told["help"])))
            kind = html.escape(f"{ast.unparse(node.annotation)} = {default}")
            rows.append(f"<tr><td><code>{ast.unparse(node.target)}</code><br>{kind}</td><td>{meaning}</td></tr>")
    if not rows:
        raise PluginError(f"{name} in {path} has no field.")
    return f"<table><thead><tr><th>field</th><th>meaning</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
