"""
Writes `quantize.safetensors`: awkward weights, and what llm-compressor's data-free `oneshot` makes of them.

    python tests/golden/make.py

The package has no part in it: the rows below become a `q_proj` of a tiny Qwen3 model, `oneshot` compresses that model
once per scheme, and the rows are cut out of what it saved. The file's metadata holds the versions. Make it anew only
when llm-compressor changes its arithmetic on purpose, and say so in CHANGELOG.md: checkpoints then differ too.
"""

import importlib.metadata
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


GOLDEN = Path(__file__).with_name("quantize.safetensors")
SCHEMES = {"W4A16-32": 32, "W4A16-64": 64, "W4A16-128": 128, "W4A16-channel": -1, "FP8_DYNAMIC": None}
SMALLEST = 2.0**-133  # the first bfloat16 above zero


def awkward_rows():
    """Names and values of the rows, `(rows, 128)` bfloat16."""
    rng = torch.Generator().manual_seed(0)

    def noise(scale=0.02):
        return scale * torch.randn(128, generator=rng)

    def with_value(row, index, value):
        row[index] = value
        return row

    steps = torch.arange(128)
    rows = {
        "zeros": torch.zeros(128),
        "negative zeros": torch.full((128,), -0.0),
        "one positive outlier": with_value(noise(), 5, 10.0),
        "one negative outlier, code -8": with_value(noise(), 70, -10.0),
        "both signs of the largest": torch.where(steps % 2 == 0, 0.3, -0.3),
        "ties between codes": (steps % 16 - 8) + 0.5,  # scale 1: every value is halfway
        "a group of zeros among others": torch.where(steps < 32, 0.0, noise()),
        "denormals": (steps % 31 - 15) * SMALLEST,
        "denormals whose scale is zero": (steps % 3 - 1) * SMALLEST,
        "small negatives that round to zero": with_value(-noise(1e-5).abs(), 3, 1.0),
        "huge": noise(1e37),
        "constant": torch.full((128,), -0.7),
        "normal": noise(),
        "normal, wide": noise(3.0),
    }
    return list(rows), torch.stack(list(rows.values())).bfloat16()


def oneshot_rows(scheme, group_size, rows):
    """The tensors of `rows` in a model compressed by llm-compressor."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from conftest import make_model
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights = {"num_bits": 4, "type": "int", "symmetric": True} | strategy
    recipe = (
        {"targets": "Linear", "scheme": scheme}
        if group_size is None
        else {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    )
    with tempfile.TemporaryDirectory() as folder:
        make_model(dtype=torch.bfloat16, num_hidden_layers=1).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.model.layers[0].self_attn.q_proj.weight.data[: len(rows)] = rows
        oneshot(model=model, recipe=QuantizationModifier(ignore=["lm_head"], **recipe))
        model.save_pretrained(folder)
        tensors = load_file(f"{folder}/model.safetensors")
    prefix = "model.layers.0.self_attn.q_proj."
    return {
        name.removeprefix(prefix): tensor[: len(rows)].contiguous()
        for name, tensor in tensors.items()
        if name.startswith(prefix) and not name.endswith("weight_shape")
    }


def main():
    names, rows = awkward_rows()
    tensors = {"master": rows}
    for name, group_size in SCHEMES.items():
        scheme = name.split("-")[0]
        tensors |= {f"{name}.{key}": value for key, value in oneshot_rows(scheme, group_size, rows).items()}
    versions = {name: importlib.metadata.version(name) for name in ("llmcompressor", "compressed-tensors", "torch")}
    save_file(tensors, GOLDEN, metadata={"rows": "; ".join(names), **versions})
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes, {versions}")


if __name__ == "__main__":
    main()
