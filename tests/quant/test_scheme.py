"""`qarl_trl.quant.scheme`: names to schemes, and what no learner forward exists for."""

import pytest
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from qarl_trl.quant.scheme import (
    ALIASES,
    SUPPORTED,
    check_divisible,
    effective_group_size,
    is_off,
    resolve_scheme,
    support_of,
)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def scheme_of(weights, activations=None, **more):
    given = QuantizationArgs(**activations) if activations else None
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=given, **more)


@pytest.mark.parametrize(
    ("scheme", "off"),
    [(None, True), ("none", True), ("None", True), (" NONE ", True), ("", True), ("W4A16", False), ("w4a16", False)],
)
def test_off_is_none_in_any_writing(scheme, off):
    assert is_off(scheme) == off


def test_a_scheme_object_is_never_off():
    assert not is_off(scheme_of(INT4))


@pytest.mark.parametrize("name", list(SUPPORTED))
@pytest.mark.parametrize("write", [str, str.lower, lambda name: f" {name} "])
def test_a_name_resolves_to_the_preset_of_compressed_tensors(name, write):
    resolved = resolve_scheme(write(name))
    preset = preset_name_to_scheme(name, targets=["Linear"])
    assert resolved.format.value == SUPPORTED[name].format
    preset.format = resolved.format
    assert resolved == preset
    assert support_of(resolved) is SUPPORTED[name]


@pytest.mark.parametrize(
    ("group_size", "effective", "strategy"),
    [(None, 128, "group"), (32, 32, "group"), (64, 64, "group"), (128, 128, "group"), (-1, None, "channel")],
)
def test_group_size_of_w4a16_is_chosen(group_size, effective, strategy):
    resolved = resolve_scheme("W4A16", group_size)
    assert effective_group_size(resolved) == effective
    assert resolved.weights.strategy == strategy
    assert support_of(resolved).name == "W4A16"


def test_resolving_changes_neither_the_preset_nor_the_scheme_given():
    given = scheme_of(INT4)
    before = given.model_copy(deep=True)
    resolved = resolve_scheme(given, 32)
    assert given == before != resolved
    resolve_scheme("W4A16", 32)
    assert resolve_scheme("W4A16").weights.group_size == 128


@pytest.mark.parametrize(
    ("scheme", "group_size", "words"),
    [
        ("W5A16", None, ["quant_scheme='W5A16'", "'FP8_DYNAMIC', 'W4A16'", "'none'"]),
        ("W4A16", 16, ["quant_group_size=16", "W4A16", "(32, 64, 128, -1)"]),
        ("W4A16", 0, ["quant_group_size=0"]),
        ("FP8_DYNAMIC", 128, ["quant_group_size=128", "FP8_DYNAMIC", "leave it unset"]),
    ],
)
def test_an_unknown_name_or_group_size_is_refused(scheme, group_size, words):
    with pytest.raises(ValueError) as error:
        resolve_scheme(scheme, group_size)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("weights", "activations"),
    [
        (INT4 | {"group_size": 16}, None),
        (INT4 | {"num_bits": 6}, None),
        (INT4 | {"type": "float"}, None),
        (INT4 | {"strategy": "tensor", "group_size": None}, None),
        (INT4, FP8_TOKEN),
        # `quantize_weight` rounds to nearest between minimum and maximum, in the order the weights have.
        (INT4 | {"observer": "mse"}, None),
        (INT4 | {"actorder": "weight"}, None),
        (INT4 | {"scale_dtype": "torch.float8_e4m3fn"}, None),
        (FP8, None),
        (FP8 | {"strategy": "tensor"}, FP8_TOKEN),
        (FP8, FP8_TOKEN | {"strategy": "tensor"}),
        (FP8, FP8_TOKEN | {"symmetric": False}),
    ],
)
def test_a_scheme_without_a_learner_forward_is_refused(weights, activations):
    with pytest.raises(ValueError, match=r"has no learner forward.*W4A16.*FP8_DYNAMIC.*rounded to nearest"):
        resolve_scheme(scheme_of(weights, activations))


def test_schemes_without_weights_or_with_output_activations_are_refused():
    for scheme in (
        QuantizationScheme(targets=["Linear"]),
        scheme_of(INT4, output_activations=QuantizationArgs(**FP8)),
    ):
        with pytest.raises(ValueError, match="has no learner forward"):
            resolve_scheme(scheme)


@pytest.mark.parametrize(
    ("weights", "activations", "name"),
    [
        (INT4, None, "W4A16"),
        (INT4 | {"group_size": 32, "observer": "minmax"}, None, "W4A16"),
        (INT4 | {"observer": "memoryless_minmax"}, None, "W4A16"),
        (INT4 | {"strategy": "channel", "group_size": None}, None, "W4A16"),
        (FP8, FP8_TOKEN, "FP8_DYNAMIC"),
    ],
)
def test_a_scheme_that_can_be_trained_is_accepted(weights, activations, name):
    assert support_of(resolve_scheme(scheme_of(weights, activations))).name == name


def test_every_preset_is_either_supported_or_refused_by_name():
    for name in PRESET_SCHEMES:
        if name in SUPPORTED or name in ALIASES:
            assert support_of(resolve_scheme(name)).name == ALIASES.get(name, name)
        else:
            with pytest.raises(ValueError, match="not a scheme qarl_trl can train with"):
                resolve_scheme(name)


@pytest.mark.parametrize(
    ("in_features", "group_size", "remedies"),
    [
        (96, 128, "[32]"),
        (192, 128, "[32, 64]"),
        (100, 32, "none of the group sizes"),
        (8, 32, "none of the group sizes"),
    ],
)
def test_a_size_that_the_group_does_not_divide_names_the_layer_and_both_remedies(in_features, group_size, remedies):
    with pytest.raises(ValueError) as error:
        check_divisible("model.layers.3.mlp.down_proj", in_features, resolve_scheme("W4A16", group_size))
    message = str(error.value)
    for words in ("'model.layers.3.mlp.down_proj'", f"in_features={in_features}", f"group_size={group_size}",
                  "`quant_ignore`", "`quant_group_size`", remedies, "or -1"):  # fmt: skip
        assert words in message


def test_a_size_that_the_group_divides_passes():
    for scheme in (resolve_scheme("W4A16"), resolve_scheme("W4A16", -1), resolve_scheme("FP8_DYNAMIC")):
        check_divisible("layer", 256, scheme)
    check_divisible("layer", 100, resolve_scheme("W4A16", -1))
    check_divisible("layer", 100, resolve_scheme("FP8_DYNAMIC"))
