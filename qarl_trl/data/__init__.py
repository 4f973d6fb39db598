"""Problems: read them, and make prompts and reference answers of them."""

from .files import load_rows, local_path
from .load import load_math_dataset, load_prompts
from .rows import final_answer


__all__ = ["final_answer", "load_math_dataset", "load_prompts", "load_rows", "local_path"]
