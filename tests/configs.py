"""The settings that tests of refusals start from, and where the synced maths sets are."""

import os
from pathlib import Path

import pytest

from qarl_trl import QaRLConfig


MATH_SETS = Path(os.environ.get("QARL_MATH_SETS", Path(__file__).parents[2] / "shared" / "data" / "math"))
needs_math_sets = pytest.mark.skipif(not MATH_SETS.is_dir(), reason=f"QARL_MATH_SETS: {MATH_SETS} is no folder")


def config(tmp_path, **changes):
    return QaRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **changes)
