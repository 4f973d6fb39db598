"""
What a weight sync moves between two processes under FSDP2, and its time: quantized values of shards against whole
float32 master weights. And what forward and backward gather, by quantized values and by bfloat16 weights.

Both arms of a weight sync make the same bytes of the same model in turns: ours from `DTensor`s, the other from
parameters that were made whole first, as TRL's stream does (`VLLMGeneration._iter_fsdp2_params`), which every process
then quantizes. No engine. A pass has one row of tokens, so that its time is that of the gathers and the
dequantization.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import torch


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


def syncs(path: str, scheme: str, rounds: int) -> dict[str, Any]:
    """In each of the processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = apply_quantization(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), scheme)
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    arms = {
        "quantized": lambda: dict(iter_low_bit_weights(model)),
        "master_weights": lambda: {n: p.full_tensor() for n, p in model.named_parameters()},
    }
    moved: dict[str, int] = {}
    streams: list[dict[str, torch.Tensor]] = []
    for name, sync in arms.items():
        with MovedBytes() as counted:
            streams.append(sync())
        moved[name] = counted.gathered

    synced, master_weights = streams
    for name, layer in quantized_modules(model):
        expected = quantize_weight(master_weights[f"{name}.weight"], layer.scheme)
        for local, tensor in expected.tensors.items():
            if not torch.equal(tensor.view(torch.uint8), synced[f"{name}.{local}"].view(torch.uint8)):
                raise RuntimeError(f"{name}.{local} differs")

    layers = [n for n, _ in model.named_parameters() if "_proj" in n]
    weights = sum(model.get_parameter(n).numel() for n in layers)
    rest = sum(p.numel() for p in model.parameters()) - weights
    times = common.interleave({name: lambda run=run: run() and None for name, run in arms.items()}, rounds)
    torch.distributed.destroy_process_group()
    # The rest (embeddings, norms) moves in bfloat16 instead of float32; of two processes each receives half.
    layers_ratio = (moved["quantized"] - rest) / (moved["master_weights"] - 2 * rest)
    return {"moved": moved, "layers": layers_ratio, "times": times, "weights": weights, "rest": rest}


def passes(path: str, scheme: str, rounds: int) -> dict[str, Any]:
    """In each of the processes: forward and backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    mesh, policy = init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    models, tokens = {}, torch.arange(16)[None] + torch.distributed.get_rank()
    for arm in ("quantized", "weights"):
        models[arm] = apply_quantization(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), scheme)
        if arm == "quantized":
            low_bit_store(models[arm]).gather_quantized(2, torch.device("cpu"))
        for module in (*models[arm].model.layers, models[arm]):
            fully_shard(module, mesh=mesh, mp_policy=policy)

    def run(arm: str) -> torch.Tensor:
        models[arm].zero_grad()
        loss = models[arm](tokens, labels=tokens).loss
        loss.backward()
        return loss

    moved, held, results = {}, {}, []
    for arm, model in models.items():
        with MovedBytes() as counted:
            loss = run(arm)
        results.append([loss.detach(), *(p.grad.to_local() for p in model.parameters())])
        weights = low_bit_store(model).kept().values()
        moved[arm], held[arm] = counted.gathered, sum(sum(t.nbytes for t in w.tensors.values()) for w in weights)
    if not all(map(torch.equal, *results)):
        raise RuntimeError("The losses or the gradients differ.")
    times = common.interleave({arm: lambda arm=arm: run(arm) and None for arm in models}, rounds)
    torch.distributed.destroy_process_group()
    return {"moved": moved, "held": held, "times": times}


def main() -> None:
    args = common.arguments(
        __doc__,
        hidden=(1024, 256, "model width"),
        layers=(4, 2, "decoder layers"),
        inner=(2816, 512, "width of the MLP"),
        vocabulary=(4096, 256, "tokens in the vocabulary"),
        rounds=(7, 3, "syncs of each arm"),
    )
    load, rows, headlines, times = os.getloadavg()[0], [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        path = common.save_model(Path(folder) / "model", args.hidden, args.layers, args.inner, args.vocabulary)
        for scheme in SCHEMES:
            found, _ = isolated_group(syncs, 2, path, scheme, args.rounds)
            moved, times[scheme] = found["moved"], found["times"]
            ratio = common.ratio(found["times"], "quantized", "master_weights")
            learner, _ = isolated_group(passes, 2, path, scheme, args.rounds)
            gathered, held, times[f"{scheme} passes"] = learner["moved"], learner["held"], learner["times"]
            pass_ratio = common.ratio(learner["times"], "quantized", "weights")
            # The rest is gathered once and twice as before; what quantized values save is the layers'.
            saved, layers = gathered["weights"] - gathered["quantized"], 2 * found["weights"]
            rows.append(
                {
                    "scheme": scheme,
                    "quantized layers": found["layers"],
                    "all": moved["quantized"] / moved["master_weights"],
                    "bytes": moved["quantized"],
                    "bytes of master weights": moved["master_weights"],
                    "time": ratio["ratio"],
                    "s": ratio["seconds"],
                    "master weights s": ratio["base_seconds"],
                    "passes": gathered["quantized"] / gathered["weights"],
                    "passes, layers": 1 - saved / layers,
                    "passes bytes": gathered["quantized"],
                    "passes bytes of weights": gathered["weights"],
                    "held": held["quantized"],
                    "held whole": held["weights"],
                    "passes time": pass_ratio["ratio"],
                }
            )
            headlines.append(
                f"{scheme}: {found['layers']:.3f} of the bytes of float32 master weights for its layers, "
                f"{rows[-1]['all']:.3f} with embeddings and norms; {ratio['ratio']:.2f} of the time, with quantization"
            )
            headlines.append(
                f"{scheme}, forward and backward: {rows[-1]['passes, layers']:.3f} of the bytes of bfloat16 weights "
                f"for its layers, {rows[-1]['passes']:.3f} with the rest; quantized values held "
                f"{held['quantized'] / held['weights']:.3f} of the whole; {pass_ratio['ratio']:.2f} of the time"
            )
    common.report("bench_gather", args, headlines, rows, load, times=times)


if __name__ == "__main__":
    main()
