"""`first_run.py --dry` writes its page."""

import subprocess
import sys
from pathlib import Path


def test_a_dry_stage_finishes_and_is_on_the_page(tmp_path):
    page, script = tmp_path / "page.md", Path(__file__).with_name("first_run.py")
    command = [sys.executable, str(script), "--dry", "--only", "quantizer", "--out", str(page)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr + page.with_suffix(".log").read_text()
    text = page.read_text()
    assert "## quantizer: ok" in text and "- commit: " in text and "W4A16, there and back" in text
    assert '"32 of 32 hold"' in text
