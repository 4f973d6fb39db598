"""
What a publish moves between two processes under FSDP2, and its time: codes of shards against whole float32 masters.

Both arms make the same bytes of the same model in turns: ours from `DTensor`s, the other from parameters that were made
whole first, as TRL's stream does (`VLLMGeneration._iter_fsdp2_params`), which every process then quantizes. No engine.
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

from qarl_trl.quant import apply_quantization, iter_low_bit_weights


SCHEMES = ("W4A16", "W4A16_ASYM", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8")


def publishes(path: str, scheme: str, rounds: int) -> dict[str, Any]:
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
        "codes": lambda: dict(iter_low_bit_weights(model)),
        "masters": lambda: dict(
            iter_low_bit_weights(model, ((n, p.full_tensor()) for n, p in model.named_parameters()))
        ),
    }
    moved, streams = {}, []
    for name, publish in arms.items():
        with MovedBytes() as counted:
            streams.append(publish())
        moved[name] = counted.gathered
    for name, tensor in streams[0].items():
        if not torch.equal(tensor.view(torch.uint8), streams[1][name].view(torch.uint8)):
            raise RuntimeError(f"{name} differs")
    layers = [n for n, _ in model.named_parameters() if "_proj" in n]
    weights = sum(model.get_parameter(n).numel() for n in layers)
    rest = sum(p.numel() for p in model.parameters()) - weights
    times = common.interleave({name: lambda run=run: run() and None for name, run in arms.items()}, rounds)
    torch.distributed.destroy_process_group()
    # The rest (embeddings, norms) moves in bfloat16 instead of float32; of two processes each receives half.
    layers_ratio = (moved["codes"] - rest) / (moved["masters"] - 2 * rest)
    return {"moved": moved, "layers": layers_ratio, "times": times, "weights": weights, "rest": rest}


def main() -> None:
    args = common.arguments(
        __doc__,
        hidden=(1024, 256, "model width"),
        layers=(4, 2, "decoder layers"),
        inner=(2816, 512, "width of the MLP"),
        vocabulary=(4096, 256, "tokens in the vocabulary"),
        rounds=(7, 3, "publishes of each arm"),
    )
    load, rows, headlines, times = os.getloadavg()[0], [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        path = common.save_model(Path(folder) / "model", args.hidden, args.layers, args.inner, args.vocabulary)
        for scheme in SCHEMES:
            found, _ = isolated_group(publishes, 2, path, scheme, args.rounds)
            moved, times[scheme] = found["moved"], found["times"]
            ratio = common.ratio(found["times"], "codes", "masters")
            rows.append(
                {
                    "scheme": scheme,
                    "quantized layers": found["layers"],
                    "all": moved["codes"] / moved["masters"],
                    "bytes": moved["codes"],
                    "bytes of masters": moved["masters"],
                    "time": ratio["ratio"],
                    "s": ratio["seconds"],
                    "masters s": ratio["base_seconds"],
                }
            )
            headlines.append(
                f"{scheme}: {found['layers']:.3f} of the bytes of float32 masters for its layers, {rows[-1]['all']:.3f} with "
                f"embeddings and norms; {ratio['ratio']:.2f} of the time, with quantization"
            )
    common.report("bench_gather", args, headlines, rows, load, times=times)


if __name__ == "__main__":
    main()
