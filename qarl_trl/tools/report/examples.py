"""Examples of completions as HTML."""

from __future__ import annotations

from html import escape
from typing import Any

from .runs import Run


def examples(run: Run) -> str:
    """The best and the worst completion of the newest table of TRL's `log_completions`. Empty without one."""
    ranked = sorted(read_rows(run), key=lambda row: row["advantage"])
    parts = []
    for row in [ranked[-1], ranked[0]] if ranked else []:
        facts = f"update {row['step']}, advantage {row['advantage']:.3g}"
        texts = "".join(f"<pre>{escape(str(row[name]))}</pre>" for name in ("prompt", "completion"))
        parts.append(f"<p>{facts}</p>{texts}")
    return "\n".join(parts)


def read_rows(run: Run) -> list[dict[str, Any]]:
    """The newest table; none when it is being written."""
    import pyarrow.parquet as pq

    files = sorted((run.folder / "completions").glob("*.parquet"), key=lambda file: file.stat().st_mtime)
    try:
        columns = ["step", "prompt", "completion", "advantage"]
        return pq.read_table(files[-1], columns=columns).to_pylist() if files else []
    except (OSError, ValueError):  # pyarrow's errors are of these kinds
        return []
