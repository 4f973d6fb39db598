"""`qarl_trl.quant.scheme`: names to schemes, which layer gets which, and what no learner forward exists for."""

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from conftest import make_model

from qarl_trl.quant.scheme import (
    describe_scheme,
    effective_group_size,
    resolve_config,
    resolve_scheme,
    scheme_for,
    support_of,
)
from qarl_trl.quant.supported import SUPPORTED


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
FP8_BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}
FP8_GROUP = FP8_TOKEN | {"strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT8_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}


def scheme_of(weights, activations=None):
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)


# Schemes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PRESET_SCHEMES))
def test_every_preset_is_either_supported_as_it_is_or_refused_by_name(name):
    if name not in SUPPORTED:
        with pytest.raises(ValueError, match=f"quant_scheme={name!r} must be"):
            resolve_scheme(name)
        return

    # Names are taken in any case.
    resolved = resolve_scheme(name.lower())

    row = SUPPORTED[name]
    assert support_of(resolved) is row
    assert resolved.format.value == row.format
    expected = preset_name_to_scheme(name, targets=["Linear"])
    # A preset has no format before a model is compressed.
    expected.format = resolved.format
    assert resolved == expected


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, row in SUPPORTED.items() for size in row.group_sizes]
)
def test_group_size_is_chosen_and_nothing_else(name, size):
    preset = preset_name_to_scheme(name, targets=["Linear"])

    resolved = resolve_scheme(name, size)

    assert effective_group_size(resolved) == (None if size == -1 else size)
    assert support_of(resolved).name == name
    # A group size of -1 changes both: one scale a row is another strategy.
    grouping = {"strategy", "group_size"}
    assert resolved.weights.model_dump(exclude=grouping) == preset.weights.model_dump(exclude=grouping)
    assert resolved.input_activations == preset.input_activations


@pytest.mark.parametrize(("scheme", "group_size"), [("W4A16", 16), ("FP8_BLOCK", 128)])
def test_a_group_size_that_the_scheme_does_not_take_is_refused(scheme, group_size):
    with pytest.raises(ValueError, match=f"quant_group_size={group_size} .*{scheme}"):
        resolve_scheme(scheme, group_size)


@pytest.mark.parametrize(
    ("weights", "activations"),
    [
        # Each is a step away from a scheme that runs.
        (INT4 | {"group_size": 16}, None),
        (INT4 | {"type": "float"}, None),
        (INT4 | {"group_size": 64}, FP8_TOKEN),
        # `quantize_weight` rounds to nearest between minimum and maximum, in the order the weights have.
        (INT4 | {"observer": "mse"}, None),
        (INT4 | {"actorder": "weight"}, None),
        (INT4 | {"scale_dtype": "torch.float8_e4m3fn"}, None),
        (FP8, None),
        (FP8 | {"strategy": "tensor"}, FP8_TOKEN),
        (FP8_BLOCK | {"block_structure": [64, 128]}, FP8_GROUP),
        (FP8_BLOCK, FP8_GROUP | {"group_size": 64}),
        (INT8, INT8_TOKEN | {"symmetric": False}),
        (INT8, INT8_TOKEN | {"dynamic": False, "strategy": "tensor"}),
    ],
)
def test_a_scheme_without_a_learner_forward_is_refused(weights, activations):
    with pytest.raises(ValueError, match="has no learner forward"):
        resolve_scheme(scheme_of(weights, activations))


def test_words_tell_schemes_apart():
    descriptions = {describe_scheme(resolve_scheme(name)) for name in SUPPORTED}

    assert len(descriptions) == len(SUPPORTED)
    assert describe_scheme(resolve_scheme("W4A16_ASYM")) == "weights int4 per group 128, asymmetric"


# Plans --------------------------------------------------------------------------------------------------------------

CONFIGS = {
    "one scheme": QuantizationConfig(config_groups={"W4A16": ["Linear"]}, ignore=["lm_head"]),
    # Layers that two or three groups match, so the order of precedence decides.
    "name before pattern before class": QuantizationConfig(
        config_groups={
            "W8A16": ["Linear"],
            "W4A16": ["re:.*mlp.*_proj$"],
            "FP8_DYNAMIC": ["model.layers.0.mlp.up_proj"],
        },
        ignore=["re:.*down_proj$"],
    ),
}


@pytest.mark.parametrize("case", list(CONFIGS))
def test_each_layer_takes_the_scheme_that_compressed_tensors_gives_it(case):
    config = CONFIGS[case]
    # Names and classes decide, and not values.
    with torch.device("meta"):
        model = make_model()
        theirs = make_model()

    schemes = {}
    for name, module in model.named_modules():
        scheme = scheme_for(name, module, config)
        if scheme is not None:
            schemes[name] = scheme

    apply_quantization_config(theirs, config)
    expected = {}
    for name, module in theirs.named_modules():
        if getattr(module, "quantization_scheme", None) is not None:
            expected[name] = module.quantization_scheme
    assert schemes == expected
    assert len({describe_scheme(scheme) for scheme in expected.values()}) == len(config.config_groups)


def test_a_quantized_cache_is_refused():
    config = QuantizationConfig(config_groups={"W4A16": ["Linear"]}, kv_cache_scheme={"num_bits": 8})

    with pytest.raises(ValueError, match="kv_cache_scheme"):
        resolve_config(config)
