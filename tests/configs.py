"""The settings that tests of refusals start from."""

from qarl_trl import QaRLConfig


def config(tmp_path, **changes):
    return QaRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **changes)
