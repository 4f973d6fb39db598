"""The settings that tests of refusals start from, the fields of configs, and where the synced maths sets are."""

import os
from dataclasses import fields
from pathlib import Path

import pytest

from qarl_trl import QaRLConfig


MATH_SETS = Path(os.environ.get("QARL_MATH_SETS", Path(__file__).parents[2] / "shared" / "data" / "math"))
needs_math_sets = pytest.mark.skipif(not MATH_SETS.is_dir(), reason=f"QARL_MATH_SETS: {MATH_SETS} is no folder")


def config(tmp_path, kind=QaRLConfig, **changes):
    # TRL trains in bfloat16 by default, which transformers refuses without a GPU; and no test may reach a tracker.
    return kind(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **changes)


def field_names(*configs):
    """The names of all fields of some dataclasses."""
    names = set()
    for config in configs:
        for field in fields(config):
            names.add(field.name)
    return names
