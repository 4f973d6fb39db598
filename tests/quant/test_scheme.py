"""`qarl_trl.quant.scheme`: names to schemes, and what no learner forward exists for."""

import pytest
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from qarl_trl.quant.scheme import _fits, check_divisible, effective_group_size, is_off, resolve_scheme, support_of
from qarl_trl.quant.table import ALIASES, GPU_GENERATIONS, SUPPORTED


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
FP8_BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}
FP8_GROUP = FP8_TOKEN | {"strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT8_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
GROUPED = [name for name, row in SUPPORTED.items() if row.group_sizes]


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


@pytest.mark.parametrize("scheme", [name for name in GROUPED if name != "W4AFP8"])
@pytest.mark.parametrize(
    ("group_size", "effective", "strategy"),
    [(32, 32, "group"), (64, 64, "group"), (128, 128, "group"), (-1, None, "channel")],
)
def test_group_size_is_chosen(scheme, group_size, effective, strategy):
    resolved = resolve_scheme(scheme, group_size)
    assert effective_group_size(resolved) == effective
    assert resolved.weights.strategy == strategy
    assert support_of(resolved).name == scheme
    preset = preset_name_to_scheme(scheme, targets=["Linear"])
    assert resolved.input_activations == preset.input_activations
    assert resolved.weights.num_bits == preset.weights.num_bits


@pytest.mark.parametrize(
    ("scheme", "group_size"), [("W4A16", 128), ("W4A16_ASYM", 128), ("W8A16", 128), ("W4A8", 128), ("W8A8", None)]
)
def test_without_a_group_size_the_one_of_the_preset_stays(scheme, group_size):
    assert effective_group_size(resolve_scheme(scheme)) == group_size


@pytest.mark.parametrize(("alias", "name"), [("INT8", "W8A8"), (" int8", "W8A8")])
def test_another_name_of_a_preset_is_the_same_scheme(alias, name):
    assert resolve_scheme(alias) == resolve_scheme(name)
    assert alias not in SUPPORTED


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
        ("W5A16", None, ["quant_scheme='W5A16'", *map(repr, SUPPORTED), "'none'"]),
        ("W4A16", 16, ["quant_group_size=16", "W4A16", "(32, 64, 128, -1)"]),
        ("W4A16", 0, ["quant_group_size=0"]),
        ("FP8_DYNAMIC", 128, ["quant_group_size=128", "FP8_DYNAMIC", "leave it unset"]),
        ("FP8_BLOCK", 128, ["quant_group_size=128", "FP8_BLOCK", "leave it unset"]),
        ("W8A8", 128, ["quant_group_size=128", "W8A8", "leave it unset"]),
        ("W4A8", 256, ["quant_group_size=256", "W4A8", "(32, 64, 128, -1)"]),
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
        (INT4 | {"group_size": 64}, FP8_TOKEN),
        # `quantize_weight` rounds to nearest between minimum and maximum, in the order the weights have.
        (INT4 | {"observer": "mse"}, None),
        (INT4 | {"actorder": "weight"}, None),
        (INT4 | {"scale_dtype": "torch.float8_e4m3fn"}, None),
        (FP8, None),
        (FP8 | {"strategy": "tensor"}, FP8_TOKEN),
        (FP8, FP8_TOKEN | {"strategy": "tensor"}),
        (FP8, FP8_TOKEN | {"symmetric": False}),
        (FP8_BLOCK, None),
        (FP8_BLOCK, FP8_TOKEN),
        (FP8_BLOCK | {"block_structure": [64, 128]}, FP8_GROUP),
        (FP8_BLOCK, FP8_GROUP | {"group_size": 64}),
        (FP8, FP8_GROUP),
        (INT8, INT8_TOKEN | {"symmetric": False}),
        (INT8, INT8_TOKEN | {"strategy": "tensor"}),
        (INT8, INT8_TOKEN | {"dynamic": False, "strategy": "tensor"}),
        (INT8, FP8_TOKEN),
        (INT8 | {"symmetric": False}, None),
        (INT8 | {"symmetric": False}, INT8_TOKEN),
        (INT4 | {"symmetric": False}, INT8_TOKEN),
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
        (INT4 | {"symmetric": False}, None, "W4A16_ASYM"),
        (INT4 | {"symmetric": False, "group_size": 32}, None, "W4A16_ASYM"),
        (INT8, None, "W8A16"),
        (INT8 | {"strategy": "group", "group_size": 64}, None, "W8A16"),
        (INT8, INT8_TOKEN, "W8A8"),
        (INT8 | {"num_bits": 4}, INT8_TOKEN, "W4A8"),
        (INT4, INT8_TOKEN, "W4A8"),
        (INT4, FP8_TOKEN, "W4AFP8"),
        (FP8_BLOCK, FP8_GROUP, "FP8_BLOCK"),
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


@pytest.mark.parametrize(("out_features", "in_features"), [(64, 256), (256, 96), (200, 200)])
def test_a_size_that_blocks_do_not_divide_names_the_layer_and_both_remedies(out_features, in_features):
    scheme = resolve_scheme("FP8_BLOCK")
    with pytest.raises(ValueError) as error:
        check_divisible("model.layers.3.self_attn.k_proj", in_features, scheme, out_features)
    for words in ("'model.layers.3.self_attn.k_proj'", f"out_features={out_features}", f"in_features={in_features}",
                  "128 x 128", "`quant_ignore`", "FP8_DYNAMIC"):  # fmt: skip
        assert words in str(error.value)
    check_divisible("layer", 256, scheme, 128)
    check_divisible("layer", in_features, resolve_scheme("FP8_DYNAMIC"), out_features)  # control: the remedy is one


# The table ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SUPPORTED))
def test_a_row_says_what_its_preset_does(name):
    row, preset = SUPPORTED[name], preset_name_to_scheme(name, targets=["Linear"])
    activations = preset.input_activations
    kinds = {
        None: {"none"},
        ("float", "token"): {"fp8_token"},
        ("float", "group"): {"fp8_group"},
        ("int", "token"): {"int8_token", "int8_token_asymmetric"},
    }
    assert row.activations in kinds[None if activations is None else (activations.type, activations.strategy)]
    assert row.name == name
    assert row.gpus or row.cpu_engine
    assert set(row.gpus) <= set(GPU_GENERATIONS)
    assert bool(row.group_sizes) == (
        preset.weights.strategy in ("group", "channel") and row.name not in ("FP8_DYNAMIC", "W8A8")
    )


def test_rows_do_not_overlap():
    """A scheme is of one row: the first that fits is the only one."""
    for name, row in SUPPORTED.items():
        for size in row.group_sizes or (None,):
            resolved = resolve_scheme(name, size)
            fitting = [
                other.name
                for other in SUPPORTED.values()
                if _fits(resolved.weights, resolved.input_activations, other)
            ]
            assert fitting == [name]
