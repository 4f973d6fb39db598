"""
What a weight sync moves between two processes under FSDP2, and its time: quantized values of shards against whole
float32 master weights. And what forward and backward gather, by quantized values and by bfloat16 weights.

Both arms of a weight sync make the same bytes of the same model in turns: ours from `DTensor`s, the other from
parameters that were made whole first, as TRL's stream does (`VLLMGeneration._iter_fsdp2_params`), which every process
then quantizes. No engine. A pass has one row of tokens, so that its time is that of the gathers and the
dequantization.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor


sys.path.insert(0, str(common.ROOT / "tests"))
from collectives import MovedBytes
from slow.isolated import isolated_group

from qarl_trl.quant import (
    apply_quantization,
    iter_low_bit_weights,
    low_bit_store,
    quantize_weight,
    quantized_modules,
)


SCHEMES = ("W4A16", "W4A16_ASYM", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8")
# Processes that share the weights.
RANKS = 2


# In each of the processes -------------------------------------------------------------------------------------------


def join_group() -> Any:
    """Join the other processes, and return their device mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    return init_device_mesh("cpu", (RANKS,))


def quantized_model(path: str, scheme: str) -> Any:
    """The model of a folder, with float32 master weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return apply_quantization(model, scheme)


def shard(model: Any, **options: Any) -> None:
    """Shard a model by FSDP2, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    for module in (*model.model.layers, model):
        fully_shard(module, **options)


def without_result(run: Callable[[], Any]) -> Callable[[], None]:
    """A function that frees what `run` returned, so that it is gone when the next arm runs."""

    def call() -> None:
        run()

    return call


def check_stream(model: Any, synced: dict[str, Tensor], master_weights: dict[str, Tensor]) -> None:
    """Compare the bytes of quantized shards with those of whole weights. `RuntimeError` if some differ."""
    for name, layer in quantized_modules(model):
        expected = quantize_weight(master_weights[f"{name}.weight"], layer.scheme)
        for local, tensor in expected.tensors.items():
            if not torch.equal(tensor.view(torch.uint8), synced[f"{name}.{local}"].view(torch.uint8)):
                raise RuntimeError(f"{name}.{local} differs")


def syncs(path: str, scheme: str, rounds: int) -> dict[str, Any]:
    """Measure weight syncs, in each of the processes: bytes that one receives, and seconds."""
    mesh = join_group()
    model = quantized_model(path, scheme)
    shard(model, mesh=mesh)

    def quantized() -> dict[str, Tensor]:
        return dict(iter_low_bit_weights(model))

    def master_weights() -> dict[str, Tensor]:
        return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}

    with MovedBytes() as of_quantized:
        synced = quantized()
    with MovedBytes() as of_master_weights:
        whole = master_weights()
    check_stream(model, synced, whole)

    names = [name for name, _ in model.named_parameters() if "_proj" in name]
    weights = sum(model.get_parameter(name).numel() for name in names)
    rest = sum(parameter.numel() for parameter in model.parameters()) - weights
    # The rest (embeddings, norms) moves in bfloat16 instead of float32; of two processes each receives half.
    layers_ratio = (of_quantized.gathered - rest) / (of_master_weights.gathered - 2 * rest)

    arms = {"quantized": without_result(quantized), "master_weights": without_result(master_weights)}
    times = common.interleave(arms, rounds)
    torch.distributed.destroy_process_group()

    moved = {"quantized": of_quantized.gathered, "master_weights": of_master_weights.gathered}
    return {"moved": moved, "layers": layers_ratio, "times": times, "weights": weights, "rest": rest}


def run_pass(model: Any, tokens: Tensor) -> Tensor:
    """Run a forward and backward on rows of tokens, `(B, T)`. Returns the loss, a scalar."""
    model.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return loss


def kept_bytes(model: Any) -> int:
    """Bytes of the quantized values that this process keeps."""
    total = 0
    for weight in low_bit_store(model).kept().values():
        total += sum(tensor.nbytes for tensor in weight.tensors.values())
    return total


def passes(path: str, scheme: str, rounds: int) -> dict[str, Any]:
    """Measure forward and backward, in each of the processes: bytes that one receives and keeps, and seconds."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = join_group()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    # Other tokens in each process.
    tokens = torch.arange(16)[None] + torch.distributed.get_rank()

    models: dict[str, Any] = {}
    for name in ("quantized", "weights"):
        model = quantized_model(path, scheme)
        if name == "quantized":
            low_bit_store(model).prepare_gathers(RANKS, torch.device("cpu"))
        shard(model, mesh=mesh, mp_policy=policy)
        models[name] = model

    moved: dict[str, int] = {}
    held: dict[str, int] = {}
    results: list[list[Tensor]] = []
    for name, model in models.items():
        with MovedBytes() as counted:
            loss = run_pass(model, tokens)
        moved[name] = counted.gathered
        held[name] = kept_bytes(model)
        gradients = [parameter.grad.to_local() for parameter in model.parameters()]
        results.append([loss.detach(), *gradients])
    if not all(map(torch.equal, *results)):
        raise RuntimeError("The losses or the gradients differ.")

    arms = {name: without_result(functools.partial(run_pass, model, tokens)) for name, model in models.items()}
    times = common.interleave(arms, rounds)
    torch.distributed.destroy_process_group()
    return {"moved": moved, "held": held, "times": times}


# Here ---------------------------------------------------------------------------------------------------------------


def row_of(scheme: str, stream: dict[str, Any], learner: dict[str, Any]) -> dict[str, Any]:
    """
    The line of one scheme.

    Args:
        scheme: Its name.
        stream: What `syncs` returned.
        learner: What `passes` returned.
    """
    moved = stream["moved"]
    sync = common.ratio(stream["times"], "quantized", "master_weights")

    gathered = learner["moved"]
    held = learner["held"]
    in_pass = common.ratio(learner["times"], "quantized", "weights")
    # The rest is gathered once and twice as before; what quantized values save is the layers'.
    saved = gathered["weights"] - gathered["quantized"]
    layers = 2 * stream["weights"]

    return {
        "scheme": scheme,
        "quantized layers": stream["layers"],
        "all": moved["quantized"] / moved["master_weights"],
        "bytes": moved["quantized"],
        "bytes of master weights": moved["master_weights"],
        "time": sync["ratio"],
        "s": sync["seconds"],
        "master weights s": sync["base_seconds"],
        "passes": gathered["quantized"] / gathered["weights"],
        "passes, layers": 1 - saved / layers,
        "passes bytes": gathered["quantized"],
        "passes bytes of weights": gathered["weights"],
        "held": held["quantized"],
        "held whole": held["weights"],
        "passes time": in_pass["ratio"],
    }


def headlines_of(row: dict[str, Any]) -> list[str]:
    """What one scheme moves in a weight sync, and in forward and backward."""
    scheme = row["scheme"]
    held = row["held"] / row["held whole"]
    return [
        f"{scheme}: {row['quantized layers']:.3f} of the bytes of float32 master weights for its layers, "
        f"{row['all']:.3f} with embeddings and norms; {row['time']:.2f} of the time, with quantization",
        f"{scheme}, forward and backward: {row['passes, layers']:.3f} of the bytes of bfloat16 weights "
        f"for its layers, {row['passes']:.3f} with the rest; quantized values held "
        f"{held:.3f} of the whole; {row['passes time']:.2f} of the time",
    ]


def main() -> None:
    args = common.arguments(
        __doc__,
        hidden=(1024, 256, "model width"),
        layers=(4, 2, "decoder layers"),
        inner=(2816, 512, "width of the MLP"),
        vocabulary=(4096, 256, "tokens in the vocabulary"),
        rounds=(7, 3, "syncs of each arm"),
    )
    load = os.getloadavg()[0]

    rows: list[dict[str, Any]] = []
    headlines: list[str] = []
    times: dict[str, common.Times] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = common.save_model(Path(folder) / "model", args.hidden, args.layers, args.inner, args.vocabulary)
        for scheme in SCHEMES:
            # The processes move the same bytes and wait for each other: the first one's figures are reported.
            stream = isolated_group(syncs, RANKS, path, scheme, args.rounds)[0]
            learner = isolated_group(passes, RANKS, path, scheme, args.rounds)[0]
            times[scheme] = stream["times"]
            times[f"{scheme} passes"] = learner["times"]

            row = row_of(scheme, stream, learner)
            rows.append(row)
            headlines += headlines_of(row)

    common.report("bench_gather", args, headlines, rows, load, times=times)


if __name__ == "__main__":
    main()
