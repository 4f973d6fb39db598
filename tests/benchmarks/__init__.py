"""Tests of the scripts in benchmarks/, which import each other by name."""

import sys
from pathlib import Path


# As when one of them is run: Python puts the script's folder first.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
