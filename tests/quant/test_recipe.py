"""`qarl_trl.quant.recipe`: recipes as llm-compressor resolves them, whole or refused."""

import pytest
import torch
import yaml
from conftest import make_model

from qarl_trl.quant import apply_quantization, quantized_modules
from qarl_trl.quant.recipe import read_recipe


INT4_32 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
FP8_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}

MODIFIERS = {
    "preset": {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]},
    "presets by name": {
        "scheme": {"FP8_DYNAMIC": "re:.*self_attn.*_proj$", "W4A16": ["re:.*mlp.*_proj$"]},
        "ignore": ["lm_head", "re:.*down_proj$"],
    },
    "one group": {"config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_32}}},
    "two groups": {
        "config_groups": {
            "int4": {"targets": ["re:.*(gate|up|down)_proj$"], "weights": INT4_32},
            "fp8": {"targets": ["Linear"], "weights": FP8, "input_activations": FP8_TOKEN},
        },
        "ignore": ["re:.*lm_head"],
    },
    "observers": {"targets": ["Linear"], "scheme": "W4A16", "observer": {"weights": "minmax"}},
    "weight observer": {"targets": ["Linear"], "scheme": "W4A16", "weight_observer": "static_minmax"},
    "own observer": {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_32 | {"observer": "minmax"}}},
        "ignore": ["lm_head"],
    },
}


def write(folder, modifier, name="QuantizationModifier", stage="quant_stage", group="quant_modifiers"):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({stage: {group: {name: modifier}}}))
    return path


@pytest.mark.parametrize("case", list(MODIFIERS))
def test_a_recipe_means_what_llm_compressor_makes_of_it(case, tmp_path):
    modifier = pytest.importorskip("llmcompressor.modifiers.quantization").QuantizationModifier
    found = read_recipe(write(tmp_path, MODIFIERS[case]))
    expected = modifier(**MODIFIERS[case]).resolved_config
    for group in found.config_groups.values():
        assert group.format is not None
        group.format = None  # llm-compressor decides it when it saves
    assert found == expected
    # Control: the comparison sees a changed group.
    next(iter(found.config_groups.values())).targets.append("Conv1d")
    assert found != expected


def test_a_recipe_that_llm_compressor_wrote_is_read(tmp_path):
    Recipe = pytest.importorskip("llmcompressor.recipe").Recipe
    modifier = pytest.importorskip("llmcompressor.modifiers.quantization").QuantizationModifier
    theirs = modifier(**MODIFIERS["two groups"])
    Recipe.from_modifiers([theirs]).yaml(file_path=str(tmp_path / "recipe.yaml"))
    found = read_recipe(tmp_path / "recipe.yaml")
    assert [g.weights for g in found.config_groups.values()] == [
        g.weights for g in theirs.resolved_config.config_groups.values()
    ]
    assert found.ignore == theirs.ignore


def test_layers_of_several_schemes_run_side_by_side(tmp_path):
    model = apply_quantization(make_model(dtype=torch.bfloat16), read_recipe(write(tmp_path, MODIFIERS["two groups"])))
    bits = {name: module.scheme.weights.num_bits for name, module in quantized_modules(model)}
    assert bits["model.layers.0.self_attn.q_proj"] == 8
    assert bits["model.layers.1.mlp.down_proj"] == 4
    assert len(bits) == 14
    assert torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all()


# Refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modifier", "name", "message"),
    [
        ({"scheme": "W4A16"}, "GPTQModifier", r"recipe\.yaml.*QuantizationModifier.*GPTQModifier"),
        ({"scheme": "W4A16", "target": "Linear"}, "QuantizationModifier", r"\['target'\]"),
        ({"scheme": "W4A16", "weight_observer": "mse"}, "QuantizationModifier", "no learner forward"),
        ({"scheme": "W4A16", "kv_cache_scheme": {"num_bits": 8}}, "QuantizationModifier", "kv_cache_scheme"),
        ({"targets": "Linear"}, "QuantizationModifier", "`scheme` or `config_groups`"),
        ({"scheme": "W4A16", "config_groups": {}}, "QuantizationModifier", "`scheme` or `config_groups`"),
        ({"scheme": "W5A5"}, "QuantizationModifier", "W5A5"),
        ({"scheme": {"W4A16": ["Linear"], "FP8_DYNAMIC": ["Linear"]}}, "QuantizationModifier", "config_groups"),
        ({"config_groups": {"a": {"targets": [], "weights": INT4_32}}}, "QuantizationModifier", "config_groups"),
        ("W4A16", "QuantizationModifier", "QuantizationModifier.*W4A16"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(tmp_path, modifier, name, message):
    with pytest.raises(ValueError, match=message):
        read_recipe(write(tmp_path, modifier, name))


@pytest.mark.parametrize(
    "text",
    [
        "quant:\n  quant_modifiers:\n    QuantizationModifier: {scheme: W4A16}\n",
        "q_stage:\n  modifiers:\n    QuantizationModifier: {scheme: W4A16}\n",
        "q_stage: {}\n",
        "",
        "a: [",
    ],
)
def test_a_layout_that_llm_compressor_would_skip_over_is_refused(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="recipe.yaml cannot be used"):
        read_recipe(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"quant_recipe='.*nowhere.yaml'"):
        read_recipe(tmp_path / "nowhere.yaml")
