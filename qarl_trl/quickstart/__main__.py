"""`make quickstart`, `qarl-trl quickstart`, `python -m qarl_trl.quickstart`: options and environment of the run."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence


# Set before torch and vLLM are imported. No compiler is needed on the user's machine, and threads do not spin.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_MININTERVAL": "0.1" if sys.stderr.isatty() else "20",  # seconds; a log gets a few lines only
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the quickstart; `--help` lists the options."""
    parser = argparse.ArgumentParser(
        prog="qarl-trl quickstart", description="Train a small model by RL on 4-bit rollouts, on CPU."
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data and sampling")
    parser.add_argument("--output_dir", default="runs/quickstart", help="where the model and the report go")
    parser.add_argument("--scheme", default="W4A16", help="quant_scheme of the run")
    parser.add_argument("--rollouts", type=int, default=30, help="rollout batches of 128 completions")
    parser.add_argument("--short", action="store_true", help="a few rollouts only, for CI")
    options = parser.parse_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    from .pipeline import run

    run(options)


if __name__ == "__main__":
    main()
