"""
Writes `quantize.safetensors`: awkward weights, and what llm-compressor's data-free `oneshot` makes of them.

    python tests/golden/make.py

The package has no part in it: the rows below become a layer of a tiny Qwen3 model, `oneshot` compresses that model
once per scheme, and the rows are cut out of what it saved. The file's metadata holds the versions. Make it again only
when llm-compressor changes its arithmetic on purpose, and say so in CHANGELOG.md: checkpoints then differ too.
"""

import importlib.metadata
import itertools
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


GOLDEN = Path(__file__).with_name("quantize.safetensors")
# The sizes of the groups by the label in the file.
GROUPS = {"32": 32, "64": 64, "128": 128, "channel": -1}
IN_ALL_GROUPS = ("W4A16", "W4A16_ASYM", "W8A16", "W4A8")
SCHEMES: list[tuple[str, str | None]] = list(itertools.product(IN_ALL_GROUPS, GROUPS))
SCHEMES += [("W4AFP8", "128"), ("FP8_DYNAMIC", None), ("W8A8", None), ("FP8_BLOCK", None), ("NVFP4A16", None)]
# They were written before `shifted_rows`, and hold the rows of "master" alone.
FIRST = ("W4A16", "FP8_DYNAMIC")
# The largest weight sets the scale of all others in NVFP4A16: huge ones would leave nothing of them.
OF_BLOCKS = ("FP8_BLOCK", "NVFP4A16")
SMALLEST = 2.0**-133  # the first bfloat16 above zero


def noise_from(seed):
    """A function that gives 128 random numbers, other ones at each call."""
    rng = torch.Generator().manual_seed(seed)

    def noise(scale=0.02):
        return scale * torch.randn(128, generator=rng)

    return noise


def awkward_rows():
    """Names and values of the rows, `(rows, 128)` bfloat16."""
    noise = noise_from(seed=0)

    def with_value(row, index, value):
        row[index] = value
        return row

    # Each is a way for two quantizers to differ: zeros and signs, clamping, ties, what is too small or too large.
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


def shifted_rows():
    """Names and values of rows that are not centred on zero, `(rows, 128)` bfloat16."""
    noise = noise_from(seed=1)
    steps = torch.arange(128)
    rows = {
        "all above zero": noise().abs() + 0.1,
        "all below zero": -noise().abs() - 0.1,
        "mostly above zero": noise() + 0.03,
        "mostly below zero": noise() - 0.03,
        "zero and above": noise().relu(),
        "zero and below": -noise().relu(),
        "ties between asymmetric codes": (steps % 16) - 3.5,  # 15 steps of 1
        "denormals above zero": (steps % 31) * SMALLEST,
        "denormals below zero whose scale is zero": -(steps % 3) * SMALLEST,
        "shifted, huge": noise(1e37) + 1e37,
    }
    return list(rows), torch.stack(list(rows.values())).bfloat16()


def awkward_blocks(rows):
    """Two blocks of 128 x 128: ordinary sizes with an outlier, and denormals, `(128, 256)` bfloat16."""
    rng = torch.Generator().manual_seed(2)
    plain = 0.02 * torch.randn(128, 128, generator=rng)

    # A huge row would set the scale of the whole block.
    moderate = rows[rows.abs().amax(-1) < 100].float()
    plain[: len(moderate)] = moderate

    small = (torch.arange(128 * 128).view(128, 128) % 1001 - 500) * SMALLEST
    return torch.cat((plain, small), dim=1).bfloat16()


def oneshot_rows(scheme, label, weight):
    """The tensors of `weight`, the first rows of a layer, in a model compressed by llm-compressor."""
    # In the tiny model the former takes 128 numbers, the latter 256, which are two blocks.
    layer = "self_attn.q_proj" if weight.shape[1] == 128 else "mlp.down_proj"
    prefix = f"model.layers.0.{layer}."
    with tempfile.TemporaryDirectory() as folder:
        tensors = oneshot_tensors(scheme, label, f"{prefix}weight", weight, folder)

    rows = {}
    for name, tensor in tensors.items():
        local = name.removeprefix(prefix)
        # The shape is that of the whole layer.
        if name.startswith(prefix) and local != "weight_shape":
            rows[local] = first_rows(local, tensor, len(weight))
    return rows


def oneshot_tensors(scheme, label, name, weight, folder):
    """All tensors of a tiny model that llm-compressor compressed; `weight` is the first rows of parameter `name`."""
    # The tests' folder, for this script is started by itself.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from conftest import make_model
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    make_model(dtype=torch.bfloat16, num_hidden_layers=1).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.get_parameter(name).data[: len(weight)] = weight

    groups = {"group_0": scheme_with(scheme, label)}
    oneshot(model=model, recipe=QuantizationModifier(config_groups=groups, ignore=["lm_head"]))

    # W4AFP8 packed, as vLLM's kernel for Hopper loads it; left to itself llm-compressor stores a byte a code.
    options = {"quantization_format": "pack-quantized"} if scheme == "W4AFP8" else {}
    model.save_pretrained(folder, **options)
    return load_file(f"{folder}/model.safetensors")


def scheme_with(preset, label):
    """A preset of compressed-tensors in groups of a size of `GROUPS`; `None`: as it is."""
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, targets=["Linear"])
    if label is None:
        return scheme

    size = GROUPS[label]
    scheme.weights.strategy = "channel" if size == -1 else "group"
    scheme.weights.group_size = None if size == -1 else size
    return scheme


def first_rows(name, tensor, rows):
    """What belongs to the first `rows` output channels; zero points hold eight of them to a word."""
    count = rows // 8 if name == "weight_zero_point" else rows
    return tensor[:count].contiguous()


def main():
    names, rows = awkward_rows()
    more_names, more = shifted_rows()
    blocks = awkward_blocks(rows)
    tensors = {"master": rows, "shifted": more, "blocks": blocks}

    for scheme, label in SCHEMES:
        weight = torch.cat((rows, more))
        if scheme in OF_BLOCKS:
            weight = blocks
        elif scheme in FIRST:
            weight = rows

        title = scheme if label is None else f"{scheme}-{label}"
        for name, tensor in oneshot_rows(scheme, label, weight).items():
            tensors[f"{title}.{name}"] = tensor

    packages = ("llmcompressor", "compressed-tensors", "torch")
    versions = {name: importlib.metadata.version(name) for name in packages}
    metadata = {"rows": "; ".join(names), "shifted rows": "; ".join(more_names), **versions}
    save_file(tensors, GOLDEN, metadata=metadata)
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes, {versions}")


if __name__ == "__main__":
    main()
