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
# Its task and toy model.
sys.path.append(str(ROOT / "examples" / "quickstart"))
# Its quantization after training.
sys.path.append(str(ROOT / "examples" / "llmcompressor"))
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "vllm", "vllm-cpu", "trl", "transformers", "compressed-tensors", "llmcompressor")
CHARACTERS = "0123456789+=;# "

Times = dict[str, list[float]]


def arguments(doc: str, **defaults: tuple[Any, Any, str]) -> argparse.Namespace:
    """
    Read the command line of a benchmark.

    Args:
        doc: What `--help` says of the script.
        defaults: For each option its default, its default with `--quick`, and its help.

    Returns:
        The options by their names, and `quick`.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that the script runs, nothing else")
    for name, (full, quick, text) in defaults.items():
        option = f"--{name.replace('_', '-')}"
        help_text = f"{text} (default: {full}, with --quick {quick})"
        parser.add_argument(option, type=type(full), default=None, help=help_text)
    args = parser.parse_args()

    # Known only now: the default depends on `--quick`.
    for name, (full, quick, _) in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    return args


# Timing -------------------------------------------------------------------------------------------------------------


def interleave(arms: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1) -> Times:
    """
    Time some functions in turns.

    Args:
        arms: The functions by name. One that returns a float has measured itself, in seconds; of another the whole
            call is timed.
        rounds: How often each of them runs. Each round starts with another one.
        warmup: Number of rounds before those, which do not count.

    Returns:
        Seconds of each arm in each round.
    """
    times: Times = {name: [] for name in arms}
    names = list(arms)

    for index in range(-warmup, rounds):
        shift = index % len(names)
        gc.collect()
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            result = arms[name]()
            seconds = time.perf_counter() - start
            if isinstance(result, float):
                seconds = result

            if index >= 0:
                times[name].append(seconds)
    return times


def ratio(times: Times, arm: str, base: str) -> dict[str, float]:
    """
    Compare two arms round by round.

    Args:
        times: Seconds of each arm in each round.
        arm: What is compared.
        base: What it is compared with.

    Returns:
        Median and quartiles over the rounds of `arm / base`, and the median seconds of both.
    """
    ratios = [seconds / of_base for seconds, of_base in zip(times[arm], times[base], strict=True)]
    # A single round is all of its quartiles.
    quartiles = ratios * 3
    if len(ratios) > 1:
        quartiles = statistics.quantiles(ratios, n=4)
    low, middle, high = quartiles

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

    Args:
        function: At the top of a module, because the process is spawned.
        args: What it gets after `tick`.
        timeout: Seconds that one round may take.
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
            succeeded, result = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"{self._name} {ending(self._process.exitcode)}") from None
        if not succeeded:
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
    """
    Write a Qwen3 model with random weights, and a tokenizer of characters.

    Args:
        folder: Gets both.
        hidden: Size of the hidden state, a multiple of 64.
        layers: Number of layers.
        inner: Size inside of the MLP.
        vocabulary: Number of tokens.
        dtype: Of the weights.

    Returns:
        The folder.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokens = {"<pad>": 0, "<eos>": 1}
    for character in CHARACTERS:
        tokens[character] = len(tokens)
    raw = Tokenizer(models.WordLevel(tokens, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")

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
    model = Qwen3ForCausalLM(config).to(dtype)

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
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

    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        # Those that this process may use.
        cores = len(os.sched_getaffinity(0))

    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
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
        name: Of the script.
        args: Its settings.
        headlines: Ratios and goals, one a line.
        rows: The table.
        start_load: One-minute load average when the script began: above 0.5 the machine was not quiet.
        extra: More for the file.
    """
    headlines = list(headlines)
    where = machine()
    title = f"\n{name}"
    if args.quick:
        title += "  (--quick: sizes too small to mean anything)"
    print(title)
    for line in headlines:
        print(f"  {line}")
    print(_table(rows))

    print(f"  {where['cpu']}, {where['cores']} cores ({where['isa']}), commit {where['commit']}")
    versions = [f"{package} {version}" for package, version in where["versions"].items()]
    print("  " + ", ".join(versions))
    if start_load > 0.5:
        print(f"  The machine was busy when this started (load {start_load:.1f}): repeat on a quiet one.")

    RESULTS.mkdir(exist_ok=True)
    file = result_file(name, args.quick)
    content = {"name": name, "quick": args.quick, "headlines": headlines, "rows": rows, **extra}
    content |= {"arguments": vars(args), "start_load": start_load, "machine": where}
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(f"  -> {file.relative_to(ROOT)}")


def result_file(name: str, quick: bool) -> Path:
    """Where `report` writes."""
    if quick:
        return RESULTS / f"{name}.quick.json"
    return RESULTS / f"{name}.json"


def verdict(value: float, goal: float, at_most: bool = True) -> str:
    """
    Say whether a figure meets its goal, as in `(goal <= 1.1: met)`.

    Args:
        value: The figure.
        goal: In the same unit.
        at_most: The figure must not be above the goal; else not below it.
    """
    relation = ">="
    is_met = value >= goal
    if at_most:
        relation = "<="
        is_met = value <= goal
    return f"(goal {relation} {goal:g}: {'met' if is_met else 'missed'})"


def logged_columns(history: list[dict[str, Any]], kept: tuple[str, ...]) -> dict[str, list[float | None]]:
    """
    Turn the log of a trainer into columns: a value for each rollout batch.

    Args:
        history: `log_history` of the trainer's state.
        kept: How the names of the columns begin.

    Returns:
        Five digits of each value, `None` where a batch has none, by the name of the column.
    """
    rows = [row for row in history if "reward" in row]
    names = set()
    for row in rows:
        names |= {name for name in row if name.startswith(kept)}

    columns = {}
    for name in sorted(names):
        columns[name] = [_five_digits(row.get(name)) for row in rows]
    return columns


def _five_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""

    columns: list[str] = []
    for row in rows:
        columns += [name for name in row if name not in columns]
    lines = [columns]
    for row in rows:
        lines.append([_cell(row.get(name)) for name in columns])

    widths = []
    for column in zip(*lines, strict=True):
        widths.append(max(map(len, column)))

    padded = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        padded.append("  " + "  ".join(cells))
    return "\n".join(padded)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()

    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD") or "unknown"
    # Results and prose do not change what was measured.
    if git("status", "--porcelain", "--", "qarl_trl", "benchmarks/*.py"):
        commit += "+changes"
    return commit
