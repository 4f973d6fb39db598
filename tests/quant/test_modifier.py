"""`qarl_trl.quant.modifier`: recipes as llm-compressor resolves them, whole or refused."""

import pytest
import yaml

from qarl_trl.quant.modifier import read_modifier
from qarl_trl.quant.scheme import MINMAX


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
    "own observer": {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_32 | {"observer": "minmax"}}},
        "ignore": ["lm_head"],
    },
}


def write(folder, modifier, name="QuantizationModifier", stage="quant_stage", group="quant_modifiers"):
    """A recipe with one modifier."""
    path = folder / "recipe.yaml"
    content = {stage: {group: {name: modifier}}}
    path.write_text(yaml.safe_dump(content))
    return path


def in_order(groups):
    return sorted(groups, key=lambda group: group.targets)


@pytest.mark.parametrize("case", list(MODIFIERS))
def test_a_recipe_means_what_llm_compressor_makes_of_it(case, tmp_path):
    # The oracle is the library that would run the recipe.
    modifier = pytest.importorskip("llmcompressor.modifiers.quantization").QuantizationModifier
    expected = modifier(**MODIFIERS[case]).resolved_config

    plan = read_modifier(write(tmp_path, MODIFIERS[case]))

    groups = [group.model_copy(update={"format": None}) for group in plan.config_groups.values()]
    # Ours sets the format, which llm-compressor finds later, and leaves the usual observer unsaid.
    for group in groups:
        group.weights.observer = group.weights.observer or MINMAX
    assert in_order(groups) == in_order(expected.config_groups.values())
    assert plan.ignore == expected.ignore
    # Control: groups with other targets are not equal.
    assert groups[0].model_copy(update={"targets": ["Conv1d"]}) != groups[0]


def test_a_recipe_that_llm_compressor_wrote_is_read(tmp_path):
    Recipe = pytest.importorskip("llmcompressor.recipe").Recipe
    modifier = pytest.importorskip("llmcompressor.modifiers.quantization").QuantizationModifier
    theirs = modifier(**MODIFIERS["two groups"])
    Recipe.from_modifiers([theirs]).yaml(file_path=str(tmp_path / "recipe.yaml"))

    plan = read_modifier(tmp_path / "recipe.yaml")

    assert [group.targets for group in plan.config_groups.values()] == [["re:.*(gate|up|down)_proj$"], ["Linear"]]
    assert plan.ignore == theirs.ignore


# Refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modifier", "name", "message"),
    [
        # Another modifier, a misspelt field, one that changes scales, no scheme, an unknown one, no fields at all.
        ({"scheme": "W4A16"}, "GPTQModifier", r"recipe\.yaml.*QuantizationModifier.*GPTQModifier"),
        ({"scheme": "W4A16", "target": "Linear"}, "QuantizationModifier", r"\['target'\]"),
        ({"scheme": "W4A16", "weight_observer": "mse"}, "QuantizationModifier", "weight_observer"),
        ({"targets": "Linear"}, "QuantizationModifier", "`scheme` or `config_groups`"),
        ({"scheme": "W5A5"}, "QuantizationModifier", "W5A5"),
        ("W4A16", "QuantizationModifier", "recipe.yaml cannot be used"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(tmp_path, modifier, name, message):
    path = write(tmp_path, modifier, name)

    with pytest.raises(ValueError, match=message):
        read_modifier(path)


@pytest.mark.parametrize("text", ["quant:\n  a_modifiers:\n    QuantizationModifier: {scheme: W4A16}\n", "", "a: ["])
def test_a_layout_that_llm_compressor_would_skip_over_is_refused(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)

    with pytest.raises(ValueError, match="recipe.yaml cannot be used"):
        read_modifier(path)


def test_a_recipe_of_aliases_is_refused_in_a_short_line(tmp_path):
    """Written out, it would have ten thousand million words."""
    # Ten levels of ten: YAML keeps each level once, and only writing it out is endless.
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for number in range(1, 10):
        lines.append(f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]")
    path = tmp_path / "recipe.yaml"
    path.write_text("\n".join(lines))

    with pytest.raises(ValueError, match="recipe.yaml cannot be used") as error:
        read_modifier(path)
    assert len(str(error.value)) < 1000
