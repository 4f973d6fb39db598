"""`qarl_trl.quant.plan`: which layer gets which scheme."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from conftest import make_model

from qarl_trl.quant import apply_quantization, resolve_scheme
from qarl_trl.quant.plan import describe_scheme, match, resolve_config, single_group


CONFIGS = {
    "one scheme": QuantizationConfig(config_groups={"W4A16": ["Linear"]}, ignore=["lm_head"]),
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
    with torch.device("meta"):
        model, theirs = make_model(), make_model()
    apply_quantization_config(theirs, config)
    expected = {n: m.quantization_scheme for n, m in theirs.named_modules() if hasattr(m, "quantization_scheme")}
    assert {name: scheme for name, _, scheme in match(model.named_modules(), config)} == expected
    assert len({describe_scheme(scheme) for scheme in expected.values()}) == len(config.config_groups)


def test_a_resolved_config_is_a_new_one_with_formats():
    config = CONFIGS["one scheme"]
    resolved = resolve_config(config)
    assert resolved.config_groups["W4A16"].format == "pack-quantized"
    assert config.config_groups["W4A16"].format is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_cache_scheme": {"num_bits": 8}}, "Leave out kv_cache_scheme"),
        ({"config_groups": {}}, "no group in config_groups"),
        ({"config_groups": {"W4A16": []}}, "'W4A16' has no targets"),
        ({"config_groups": {"W4A16": ["Linear"], "W8A16": ["Linear"]}}, "'Linear' is in 'W4A16' and in 'W8A16'"),
        ({"config_groups": {"W4A4": ["Linear"]}}, "no learner forward"),
    ],
)
def test_a_config_that_cannot_be_carried_out_is_refused(change, message):
    config = QuantizationConfig.model_validate({"config_groups": {"W4A16": ["Linear"]}} | change)
    with pytest.raises(ValueError, match=message):
        resolve_config(config)


def test_words_tell_schemes_apart():
    found = {
        describe_scheme(resolve_scheme(name)) for name in ("W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC", "FP8_BLOCK")
    }
    assert len(found) == 5
    assert describe_scheme(resolve_scheme("W4A16_ASYM")) == "weights int4 per group 128, asymmetric"
    assert describe_scheme(single_group(resolve_scheme("W4A16"), ["a"], []).config_groups["group_0"]) in found


def test_a_group_that_matches_nothing_is_refused():
    scheme = preset_name_to_scheme("W4A16", targets=["Linear"])
    lost = preset_name_to_scheme("FP8_DYNAMIC", targets=["re:.*experts.*"])
    config = resolve_config(QuantizationConfig(config_groups={"group_0": scheme, "group_1": lost}))
    with pytest.raises(ValueError, match=r"matches targets=\['re:\.\*experts\.\*'\].*'group_1' quantizes nothing"):
        apply_quantization(make_model(), config)
