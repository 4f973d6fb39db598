"""Examples of completions as HTML, error tokens marked (paper Figs. 1 and 6)."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import Any

from .runs import Run
from .tokens import Tokens, read_rows


EXAMPLES = 3
COLUMNS = ("step", "prompt", "completion", "advantage")  # of TRL's `completions/`
LONGEST = 1500  # characters of a text
BEFORE, AFTER = 100, 300  # tokens shown before the first error token, and from it on


def examples(run: Run, tokens: Tokens | None) -> str:
    """Completions of a run with the most error tokens; without any, the best and the worst of the last step."""
    rows = list(read_rows(run, run.parquet_files("completions")[-1:], COLUMNS)) if tokens is None else tokens.rows
    if not rows:
        return ""
    distinct = {(str(row["prompt"]), str(row["completion"])): row for row in sorted(rows, key=error_share)}
    chosen = [row for row in distinct.values() if error_share(row)][: -EXAMPLES - 1 : -1]
    if not chosen:
        last = max(row["step"] for row in rows)
        ranked = sorted((row for row in rows if row["step"] == last), key=lambda row: row["advantage"])
        chosen = [ranked[-1], ranked[0]] if len(ranked) > 1 else ranked
    tokenizer = _tokenizer(run)
    return "\n".join(_example(row, tokenizer) for row in chosen)


def error_share(row: dict[str, Any]) -> float:
    """Share of error tokens in a stored completion; 0 where they were not stored."""
    mask = row.get("error_mask") or []
    return sum(mask) / len(mask) if mask else 0.0


def marked(row: dict[str, Any], tokenizer: Any) -> str:
    """Escaped completion around its first error token, with all of them in `<mark>`."""
    mask = row.get("error_mask") or []
    if tokenizer is None or not any(mask):
        return escape(_cut(_text(row["completion"])))
    first = mask.index(True)
    pairs = list(zip(row["token_ids"], mask, strict=True))[max(0, first - BEFORE) : first + AFTER]
    parts = [] if first <= BEFORE else ["... "]
    for wrong, group in groupby(pairs, key=lambda pair: pair[1]):
        text = escape(tokenizer.decode([token for token, _ in group], skip_special_tokens=False))
        parts.append(f"<mark>{text}</mark>" if wrong else text)
    return "".join(parts) + (" ..." if first + AFTER < len(mask) else "")


def _example(row: dict[str, Any], tokenizer: Any) -> str:
    facts = [f"update {row['step']}"]
    for name, title in (("reward", "reward"), ("advantage", "A"), ("ratio", "r"), ("mismatch_weight", "w")):
        if isinstance(row.get(name), float):
            facts.append(f"{title} {row[name]:.3g}")
    if error_share(row):
        facts.append(f"{error_share(row):.0%} error tokens")
    text = f"<pre>{escape(_cut(_text(row['prompt'])))}</pre><pre>{marked(row, tokenizer)}</pre>"
    return f'<article><p class="facts">{", ".join(facts)}</p>{text}</article>'


def _text(value: Any) -> str:
    """A text, or a conversation with the roles."""
    if isinstance(value, list):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in value)
    return str(value)


def _cut(text: str) -> str:
    more = len(text) - LONGEST
    return text if more <= 0 else f"{text[:LONGEST]} ... ({more} more characters)"


def _tokenizer(run: Run) -> Any:
    """The run's `tokenizer.json`, or None: then no single token can be marked."""
    from tokenizers import Tokenizer

    files = [*run.folder.glob("tokenizer.json"), *run.folder.glob("checkpoint-*/tokenizer.json")]
    return Tokenizer.from_file(str(files[0])) if files else None
