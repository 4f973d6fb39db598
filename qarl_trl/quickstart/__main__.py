"""`make quickstart`, `qarl-trl quickstart`, `python -m qarl_trl.quickstart`: options and environment of the run."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec

from ..quant.table import SUPPORTED
from ..rollout.cpu import check_engine_cpu


# Set before torch and vLLM are imported. No compiler is needed on the user's machine, and threads do not spin.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_MININTERVAL": "0.1" if sys.stderr.isatty() else "20",  # seconds; a log gets a few lines only
}


def main(argv: Sequence[str] | None = None) -> Callable[[], None]:
    """Check the options, say what will happen, and return the run; `--help` lists the options."""
    parser = argparse.ArgumentParser(
        prog="qarl-trl quickstart", description="Train a small model by RL on 4-bit rollouts, on CPU."
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data and sampling")
    parser.add_argument("--output_dir", default="runs/quickstart", help="where the model and the report go")
    parser.add_argument("--scheme", default="W4A16", help="quant_scheme of the run")
    parser.add_argument("--rollouts", type=int, default=30, help="rollout batches of 128 completions")
    parser.add_argument("--short", action="store_true", help="a few rollouts only, for CI")
    options = parser.parse_args(argv)
    check(options)
    print(
        "A Qwen3 of 1.2 million parameters learns sums: 420 supervised steps, then RL with rollouts in "
        f"{options.scheme}.\nAbout 3 minutes on 2 idle cores with 30 rollouts, less with --short. Model and report go to "
        f"{options.output_dir}.",
        flush=True,
    )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    from ..export import check_target

    check_target(options.output_dir)
    from .pipeline import run

    return partial(run, options)


def check(options: argparse.Namespace) -> None:
    """Refuse (`ValueError`, `ImportError`) what would fail after the warm start."""
    schemes = [name for name, row in SUPPORTED.items() if row.cpu_engine] + ["none"]
    if options.scheme not in schemes:
        raise ValueError(f"--scheme {options.scheme} must be one that the CPU engine runs: {', '.join(schemes)}.")
    if options.rollouts < 1:
        raise ValueError(f"--rollouts must be 1 or more, got {options.rollouts}.")
    check_engine_cpu("cpu")
    if find_spec("matplotlib") is None:
        raise ImportError("The picture of the run needs matplotlib: pip install 'qarl_trl[report]'.")


if __name__ == "__main__":
    from ..cli import main as cli_main

    cli_main(["quickstart", *sys.argv[1:]])
