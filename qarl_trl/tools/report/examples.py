"""Examples of completions as HTML, error tokens marked (paper Figs. 1 and 6)."""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import Any

from .runs import Run


FILES = 16  # the newest of `token_stats/` that are read
EXAMPLES = 3


def examples(run: Run) -> str:
    """Completions with the most error tokens; without any, the best and the worst of the last update. Empty without texts."""
    rows = sorted(read_rows(run), key=error_share, reverse=True)
    chosen = [row for row in rows if error_share(row)][:EXAMPLES]
    if rows and not chosen:
        step = max(row["step"] for row in rows)
        ranked = sorted((row for row in rows if row["step"] == step), key=lambda row: row["advantage"])
        chosen = [ranked[-1], ranked[0]]
    files = [*run.folder.glob("tokenizer.json"), *run.folder.glob("checkpoint-*/tokenizer.json")]
    tokenizer = None
    if chosen and files:  # otherwise no single token can be marked
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(files[0]))
    parts = []
    for row in chosen:
        facts = f"update {row['step']}, advantage {row['advantage']:.3g}, {error_share(row):.0%} error tokens"
        parts.append(f"<p>{facts}</p><pre>{escape(str(row['prompt']))}</pre><pre>{marked(row, tokenizer)}</pre>")
    return "\n".join(parts)


def read_rows(run: Run) -> list[dict[str, Any]]:
    """What `log_token_stats` stored, else the newest table of TRL's `log_completions`; files being written are left out."""
    import pyarrow.parquet as pq

    columns = ["step", "prompt", "completion", "advantage"]
    if files := sorted((run.folder / "token_stats").glob("*.parquet"))[-FILES:]:
        columns += ["token_ids", "error_mask"]
    else:
        files = sorted((run.folder / "completions").glob("*.parquet"), key=lambda file: file.stat().st_mtime)[-1:]
    rows = []
    for file in files:
        try:
            rows += pq.read_table(file, columns=columns).to_pylist()
        except (OSError, ValueError):  # pyarrow's errors are of these kinds
            continue
    return rows


def error_share(row: dict[str, Any]) -> float:
    """Share of error tokens in a stored completion; 0 where they were not stored."""
    mask = row.get("error_mask") or [0]
    return sum(mask) / len(mask)


def marked(row: dict[str, Any], tokenizer: Any) -> str:
    """Escaped completion, with the error tokens in `<mark>`."""
    if tokenizer is None or not error_share(row):
        return escape(str(row["completion"]))
    parts = []
    for wrong, group in groupby(zip(row["token_ids"], row["error_mask"], strict=True), key=lambda pair: pair[1]):
        text = escape(tokenizer.decode([token for token, _ in group], skip_special_tokens=False))
        parts.append(f"<mark>{text}</mark>" if wrong else text)
    return "".join(parts)
