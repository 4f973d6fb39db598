"""
A weight sync of experts: Python's time for experts one by one, as a checkpoint has them, and for stacks.

Claim: with stacks a sync of a mixture takes at most a tenth of the processor time, where bytes take none.

vLLM's own code for a Hopper GPU loads into a pretended one (`tests/pretended_gpu`). Layers have the number of experts
of Qwen3-30B-A3B, once with matrices so small that only Python takes time, and once with those of that model, whose
bytes a CPU copies more slowly than a GPU by far. Processor seconds, because they depend less on other processes.

- stream: the learner's, of quantized values that exist already;
- load: vLLM's reload without the next;
- kernels: `process_weights_after_loading`, the form that kernels read. Its repacking is a permutation here.

Afterwards both arms must have left the same bytes in the engine.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import common
import torch


sys.path.insert(0, str(common.ROOT / "tests"))
from slow.isolated import isolated


SCHEMES = ("W4A16", "FP8_DYNAMIC")
ONE_BY_ONE = "one by one"
STACKS = "stacks"
PARTS = ("stream", "load", "kernels")
# The size of the matrices that are small.
SMALL = "small"
GOAL = 0.1
LAYERS_OF_30B = 48


def measure(scheme: str, sizes: dict[str, int], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of the parts of a sync, of each arm in each round."""
    from pretended_gpu.engine import Engine, make_learner
    from pretended_gpu.test_reload import HOPPER

    from qarl_trl.quant import low_bit_store

    torch.set_num_threads(1)
    learner = make_learner("qwen3_moe", scheme, {**sizes, "dtype": torch.bfloat16})
    # Of optimizer steps, which there are none of: so quantized values are made once.
    low_bit_store(learner).will_be_told()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(folder, learner, HOPPER)

    # Makes the quantized values, which are not timed.
    for arm in (ONE_BY_ONE, STACKS):
        sync(learner, engine, arm)

    seconds: dict[str, list[dict[str, float]]] = {ONE_BY_ONE: [], STACKS: []}
    for number in range(rounds):
        arms = [ONE_BY_ONE, STACKS] if number % 2 else [STACKS, ONE_BY_ONE]
        for arm in arms:
            seconds[arm].append(sync(learner, engine, arm))

    check_engine(learner, engine)
    return seconds


def check_engine(learner: Any, engine: Any) -> None:
    """Raise `RuntimeError` unless both arms leave the same bytes in the engine."""
    from pretended_gpu.test_reload import same

    sync(learner, engine, ONE_BY_ONE)
    expected = engine.copies()
    # So that nothing of the last sync is left.
    engine.sleep()
    sync(learner, engine, STACKS)

    differing = [name for name, tensor in engine.tensors().items() if not same(tensor, expected[name])]
    if differing:
        raise RuntimeError(f"{len(differing)} tensors differ, first {differing[0]}")


def sync(learner: Any, engine: Any, arm: str) -> dict[str, float]:
    """Sync once. Returns the processor seconds of each part."""
    from qarl_trl.quant import low_bit_store
    from qarl_trl.quant.stream import checkpoint_stream
    from qarl_trl.rollout.vllm import reloading

    began = time.process_time()
    weight_of = low_bit_store(learner).weight_of
    stream = dict(checkpoint_stream(learner, weight_of, nullcontext, stacked=arm == STACKS))
    streamed = time.process_time()

    (method,) = {type(layer.mlp.experts.routed_experts.quant_method) for layer in engine.model.model.layers}
    # Of the reload, so without what it takes to pretend a GPU.
    with (
        seconds_in(reloading, "reload_model") as reloads,
        seconds_in(method, "process_weights_after_loading") as kernels,
    ):
        engine.sync(stream)
    return {"stream": streamed - began, "load": sum(reloads) - sum(kernels), "kernels": sum(kernels)}


@contextmanager
def seconds_in(owner: Any, name: str) -> Iterator[list[float]]:
    """A list that gets the processor seconds of each call of a function."""
    seconds: list[float] = []
    function = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = function(*args, **kwargs)
        seconds.append(time.process_time() - began)
        return result

    with patch.object(owner, name, timed):
        yield seconds


def row_of(scheme: str, size: str, layers: int, seconds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """
    The line of one scheme and size: medians by layer, in milliseconds, and the ratio of stream and load.

    Args:
        scheme: Its name.
        size: Of the matrices, in words.
        layers: Number of layers of the model.
        seconds: What `measure` returned.
    """
    row: dict[str, Any] = {"scheme": scheme, "matrices": size}
    for arm, rounds in seconds.items():
        for part in PARTS:
            row[f"{arm}, {part}"] = 1000 * statistics.median(one[part] for one in rounds) / layers

    python: common.Times = {}
    for arm, rounds in seconds.items():
        python[arm] = [one["stream"] + one["load"] for one in rounds]
    return row | common.ratio(python, STACKS, ONE_BY_ONE)


def headline_of(row: dict[str, Any], layers: int) -> str:
    """The claim for one scheme and size, and what it makes of a sync of the whole model."""
    goal = ""
    # Where bytes take none of the time.
    if row["matrices"] == SMALL:
        goal = f" {common.verdict(row['ratio'], GOAL)}"
    before = LAYERS_OF_30B * row["base_seconds"] / layers
    after = LAYERS_OF_30B * row["seconds"] / layers
    return (
        f"{row['scheme']}, {row['matrices']} matrices: stream and load {row['ratio']:.3f} of one by one{goal}; "
        f"{before:.2f} s become {after:.2f} s for {LAYERS_OF_30B} layers"
    )


def main() -> None:
    args = common.arguments(
        __doc__,
        rounds=(5, 2, "rounds"),
        layers=(2, 1, "layers"),
        experts=(128, 8, "experts of a layer"),
        hidden=(2048, 256, "hidden size"),
        inner=(768, 128, "intermediate size of an expert"),
    )
    start_load = os.getloadavg()[0]

    common_sizes = {
        "num_hidden_layers": args.layers,
        "num_experts": args.experts,
        "num_experts_per_tok": min(8, args.experts),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    }
    sizes = {
        SMALL: {"hidden_size": 256, "moe_intermediate_size": 128},
        f"{args.hidden} x {args.inner}": {"hidden_size": args.hidden, "moe_intermediate_size": args.inner},
    }

    rows = []
    for scheme in SCHEMES:
        for size, matrices in sizes.items():
            seconds = isolated(measure, scheme, common_sizes | matrices, args.rounds)
            rows.append(row_of(scheme, size, args.layers, seconds))

    headlines = [headline_of(row, args.layers) for row in rows]
    common.report("bench_sync_experts", args, headlines, rows, start_load)


if __name__ == "__main__":
    main()
