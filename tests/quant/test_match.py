"""`qarl_trl.quant.match`: which layers a plan quantizes, and what is refused before anything changes."""

import re

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from conftest import make_vision_model
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from qarl_trl.quant import apply_quantization, patterns, remove_quantization
from qarl_trl.quant.scheme import ROUTERS, resolve_scheme, single_group
from quant.toy_layers import LINEARS, names_of


def linears_with(*parts):
    """The names of `LINEARS` that contain one of `parts`."""
    names = []
    for name in LINEARS:
        if any(part in name for part in parts):
            names.append(name)
    return names


# Which layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "ignore", "expected"),
    [
        (["Linear"], [], [*LINEARS, "lm_head"]),
        (["Linear"], ["lm_head", r"re:.*down_proj$"], linears_with("self_attn", "gate_proj", "up_proj")),
        ([r"re:.*mlp\.(gate|up)_proj$"], ["lm_head"], linears_with("gate_proj", "up_proj")),
        (["model.layers.1.self_attn.q_proj"], [], ["model.layers.1.self_attn.q_proj"]),
    ],
)
def test_targets_and_ignore_choose_the_layers(tiny_model, targets, ignore, expected):
    assert names_of(apply_quantization(tiny_model(), "W4A16", targets, ignore)) == expected


def loaded(model, folder):
    """A model as `from_pretrained` gives it, which knows the names in its files."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def test_a_layer_is_ignored_by_its_name_in_the_model_and_by_that_in_its_files(tmp_path):
    """The config of a quantized checkpoint has the latter. This model has a prefix that its files lack."""

    def eyes(ignore):
        model = loaded(make_vision_model(tie_word_embeddings=False), tmp_path)
        apply_quantization(model, "FP8_DYNAMIC", ignore=["lm_head", *ignore])
        return [name for name in names_of(model) if "visual" in name]

    assert not eyes(["re:.*visual.*"])
    assert not eyes([r"re:visual\..*"])
    merged = ["visual.merger.mlp.0", "visual.merger.mlp.2"]
    assert eyes(merged) == [name for name in eyes([]) if "merger" not in name] != []
    # Control: a name that is neither.
    assert eyes([r"re:eye\..*"]) == eyes([])


def test_a_group_takes_layers_by_their_names_in_the_files_before_classes(tmp_path):
    model = loaded(make_vision_model(tie_word_embeddings=False), tmp_path)
    groups = {"W8A8": ["Linear"], "FP8_DYNAMIC": [r"re:visual\.merger.*"]}

    apply_quantization(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))

    by_name = model.model.visual.merger.mlp[0].scheme.input_activations.type
    by_class = model.model.language_model.layers[0].mlp.up_proj.scheme.input_activations.type
    assert (by_name, by_class) == ("float", "int")


def test_groups_that_take_a_layer_by_two_of_its_names_are_refused(tmp_path):
    """An engine knows the one in the files alone, and would take the other group."""
    model = loaded(make_vision_model(tie_word_embeddings=False), tmp_path)
    by_model = r"re:model\.visual\.merger.*"
    by_files = r"re:visual\.merger.*"

    with pytest.raises(ValueError, match=r"'model\.visual\.merger\.mlp\.0' matches the targets .* of several groups"):
        groups = {"W8A8": [by_model], "FP8_DYNAMIC": [by_files]}
        apply_quantization(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    # Control: both in one group.
    apply_quantization(model, QuantizationConfig(config_groups={"FP8_DYNAMIC": [by_model, by_files]}))
    assert names_of(model) == ["model.visual.merger.mlp.0", "model.visual.merger.mlp.2"]


def test_experts_are_ignored_by_their_names_in_the_files(tiny_model, tmp_path):
    """Those of Mixtral are in `block_sparse_moe` there, and in `mlp` in the model."""

    def experts(ignore):
        model = loaded(tiny_model("mixtral", num_hidden_layers=1), tmp_path)
        apply_quantization(model, "FP8_DYNAMIC", ignore=["lm_head", ignore])
        return [name for name in names_of(model) if "experts" in name]

    assert not experts(r"re:.*block_sparse_moe\.experts.*")
    # Controls: by their names in the model, and not at all.
    assert not experts(r"re:.*mlp\.experts.*")
    assert experts("re:none") == ["model.layers.0.mlp.experts"]


def model_with_routers():
    """One linear layer, three routers of a mixture, and a head."""
    # Qwen3-MoE, Qwen2-MoE and GPT-OSS have their routers under these names.
    mlp = nn.ModuleDict({name: nn.Linear(128, 128) for name in ("gate", "shared_expert_gate", "up_proj")})
    layer = nn.ModuleDict({"mlp": mlp, "router": nn.Linear(128, 128)})
    return nn.ModuleDict({"layer": layer, "lm_head": nn.Linear(128, 128)})


@pytest.mark.parametrize(
    ("outer", "inner"),
    # HunYuan, Zaya, AFMoE, DBRX, Gemma-4.
    [("gate", "wg"), ("gate", "down_proj"), ("router", "gate"), ("router", "layer"), ("router", "proj")],
)
def test_a_router_within_a_module_stays_in_high_precision(outer, inner):
    def layer():
        mlp = {outer: nn.ModuleDict({inner: nn.Linear(128, 128)}), "up_proj": nn.Linear(128, 128)}
        return nn.ModuleDict({"mlp": nn.ModuleDict(mlp)})

    assert names_of(apply_quantization(layer(), "W4A16")) == ["mlp.up_proj"]
    with pytest.raises(ValueError, match=f"'mlp.{outer}.{inner}' must stay in high precision"):
        apply_quantization(layer(), "W4A16", ignore=["lm_head"])


def test_what_chooses_the_tokens_of_sparse_attention_stays_in_high_precision():
    """DeepSeek-V3.2: vLLM has the two as one matrix in bfloat16, and quantizes the third."""

    def layer():
        indexer = {name: nn.Linear(128, 128) for name in ("wk", "weights_proj", "wq_b")}
        return nn.ModuleDict({"self_attn": nn.ModuleDict({"indexer": nn.ModuleDict(indexer)})})

    with pytest.raises(ValueError, match="indexer.wk' must stay in high precision.* quant_ignore must have") as raised:
        apply_quantization(layer(), "W4A16")

    # The list as it is printed.
    (patterns,) = re.findall(r"must have (.*)\.$", str(raised.value))
    ignore = [pattern.strip("'") for pattern in patterns.split(", ")]
    assert "lm_head" in ignore
    ignored = apply_quantization(layer(), "W4A16", ignore=ignore)
    assert names_of(ignored) == ["self_attn.indexer.wq_b"]


def test_the_head_and_routers_stay_in_high_precision_by_default_and_routers_always():
    assert names_of(apply_quantization(model_with_routers(), "W4A16")) == ["layer.mlp.up_proj"]

    # A list of one's own takes the place of the default, and engines have no low-bit routers.
    own = ["lm_head", "re:.*experts.*"]
    for router in ("layer.mlp.gate", "layer.mlp.shared_expert_gate", "layer.router"):
        with pytest.raises(ValueError, match=f"'{router}' must stay in high precision"):
            apply_quantization(model_with_routers(), "W4A16", ignore=[*own, *others_than(router)])

    # Control: with all of them it is as by default.
    model = apply_quantization(model_with_routers(), "W4A16", ignore=[*own, *ROUTERS])
    assert names_of(model) == ["layer.mlp.up_proj"]


def others_than(router):
    """The patterns of the routers that have another name."""
    return [pattern for pattern in ROUTERS if not re.fullmatch(pattern.removeprefix("re:"), router)]


class Embeddings(nn.Module):
    """As those of InternVL's eye."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 128))
        self.position_embeddings = nn.Parameter(torch.zeros(1, 16, 128))


def test_one_matrix_alone_is_no_stack_of_experts():
    model = nn.ModuleDict({"embeddings": Embeddings(), "up_proj": nn.Linear(128, 128)})

    assert names_of(apply_quantization(model, "W4A16")) == ["up_proj"]

    # Control: by its name one expert is a stack, which is not left in high precision.
    model = nn.ModuleDict({"embeddings": Embeddings(), "up_proj": nn.Linear(128, 128)})
    model["embeddings"].down_proj = nn.Parameter(torch.zeros(1, 128, 128))
    with pytest.raises(ValueError, match="The experts 'embeddings' .* must have the parameters"):
        apply_quantization(model, "W4A16")


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore", [["lm_head"], ["lm_head", "re:.*experts.*"]])
def test_experts_whose_names_vllm_does_not_read_are_refused(ignore):
    """LFM2-MoE: vLLM would drop their tensors without a word, also those in high precision."""
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2}
    layers = {"num_hidden_layers": 1, "num_dense_layers": 0, "layer_types": ["full_attention"]}
    model = Lfm2MoeForCausalLM(Lfm2MoeConfig(**sizes, **heads, **layers))

    with pytest.raises(ValueError, match="Lfm2MoeExperts.* stored under names that vLLM does not read"):
        apply_quantization(model, "W4A16", ignore=[*ignore, *ROUTERS])


class LinearWithAdapter(nn.Linear):
    """A layer of another library."""


def test_a_layer_that_cannot_be_quantized_is_an_error_and_changes_nothing(tiny_model):
    model = tiny_model()
    # In the second layer, so that layers before it have matched already when the error comes.
    model.model.layers[1].mlp.up_proj.__class__ = LinearWithAdapter

    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.up_proj'.*LinearWithAdapter"):
        apply_quantization(model, "W4A16")

    assert names_of(model) == []


@pytest.mark.parametrize(
    ("sizes", "scheme", "group_size"),
    [((8, 256), "W4A16", 128), ((8, 104), "W4A16", -1), ((128, 256), "FP8_BLOCK", None)],
)
def test_a_layer_that_groups_or_blocks_divide_is_quantized(sizes, scheme, group_size):
    out_features, in_features = sizes
    model = nn.ModuleDict({"up_proj": nn.Linear(in_features, out_features)})

    assert names_of(apply_quantization(model, scheme, group_size=group_size)) == ["up_proj"]


@pytest.mark.parametrize(("sizes", "scheme", "group_size"), [((8, 192), "W4A16", 128), ((64, 256), "FP8_BLOCK", None)])
def test_a_layer_that_groups_or_blocks_do_not_divide_is_refused(sizes, scheme, group_size):
    out_features, in_features = sizes
    model = nn.ModuleDict({"up_proj": nn.Linear(in_features, out_features)})

    with pytest.raises(ValueError, match=f"'up_proj'.*out_features={out_features}.*in_features={in_features}"):
        apply_quantization(model, scheme, group_size=group_size)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A16"])
def test_a_layer_whose_rows_do_not_fill_words_is_refused_before_weights_load(scheme):
    # Without memory, as the checks of a run have the model.
    model = nn.ModuleDict({"up_proj": nn.Linear(100, 8, device="meta")})

    with pytest.raises(ValueError, match="'up_proj' has in_features=100, which must be a multiple of 8"):
        apply_quantization(model, scheme, group_size=-1)

    # Control: a scheme whose checkpoints are not packed takes it.
    assert names_of(apply_quantization(model, "FP8_DYNAMIC")) == ["up_proj"]


def test_a_tied_head_cannot_be_quantized(tiny_model):
    model = tiny_model(tie_word_embeddings=True)

    with pytest.raises(ValueError, match="'lm_head'.*tied"):
        apply_quantization(model, "W4A16", ignore=[])

    # Control: without the head it is quantized.
    assert names_of(apply_quantization(model, "W4A16")) == LINEARS


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("W4A16", {"targets": ["Liner"]}),
        (QuantizationConfig(config_groups={"W4A16": ["Linear"], "FP8_DYNAMIC": ["re:.*experts.*"]}), {}),
        (QuantizationConfig(config_groups={}), {}),
    ],
    ids=["misspelt", "one of two groups", "no group"],
)
def test_a_group_that_matches_nothing_is_an_error(tiny_model, scheme, options):
    with pytest.raises(ValueError, match="targets=.*must match a layer"):
        apply_quantization(tiny_model(), scheme, **options)


def test_a_layer_of_two_groups_is_refused(tiny_model):
    """Of these two patterns vLLM takes the one that it reads first, and compressed-tensors the second."""
    wide, narrow = "re:.*mlp.*", "re:.*down_proj$"
    plan = QuantizationConfig(config_groups={"FP8_DYNAMIC": [wide], "W8A8": [narrow]})

    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.down_proj' matches the targets .* several groups"):
        apply_quantization(tiny_model(), plan)

    # Control: a pattern beside a class, which comes last for all, and patterns that exclude each other.
    for others in ("Linear", "re:.*mlp\\.(gate|up)_proj$"):
        plan = QuantizationConfig(config_groups={"FP8_DYNAMIC": [others], "W8A8": [narrow]}, ignore=["lm_head"])
        model = apply_quantization(tiny_model(), plan)
        assert model.model.layers[0].mlp.down_proj.scheme.input_activations.type == "int"
        assert model.model.layers[0].mlp.up_proj.scheme.input_activations.type == "float"


def test_a_layer_of_two_groups_with_one_arithmetic_is_quantized(tiny_model):
    """Whichever group an engine takes, it computes the same."""
    wide, narrow = "re:.*mlp.*", "re:.*(mlp\\.down|self_attn\\.o)_proj$"
    scheme = preset_name_to_scheme("W8A8", [wide])
    groups = {"first": scheme, "second": preset_name_to_scheme("W8A8", [narrow])}

    model = apply_quantization(tiny_model(), QuantizationConfig(config_groups=groups))

    assert model.model.layers[0].mlp.down_proj.scheme.weights == scheme.weights
    # Control: with another arithmetic in the second group it is refused.
    groups["second"] = preset_name_to_scheme("FP8_DYNAMIC", [narrow])
    with pytest.raises(ValueError, match="several groups"):
        apply_quantization(tiny_model(), QuantizationConfig(config_groups=groups))


def test_a_model_that_is_quantized_already_is_refused(tiny_model):
    model = apply_quantization(tiny_model(num_hidden_layers=1), "W4A16")

    with pytest.raises(ValueError, match=r"quantized already.*remove_quantization"):
        apply_quantization(model, "FP8_DYNAMIC")

    # The advice works.
    apply_quantization(remove_quantization(model), "FP8_DYNAMIC")


def test_a_model_that_another_library_quantized_is_refused(tiny_model):
    model = tiny_model(num_hidden_layers=1)
    # As transformers leaves it in a model that it loaded in low bits.
    model.config.quantization_config = {"quant_method": "gptq"}

    with pytest.raises(ValueError, match="quantized already.*gptq"):
        apply_quantization(model, "W4A16")


def test_adapters_without_a_peft_model_around_them_are_refused(tiny_model):
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = tiny_model(num_hidden_layers=1)
    model.add_adapter(adapter)

    with pytest.raises(ValueError, match="without a PeftModel"):
        apply_quantization(model, "W4A16")

    # Control: the same adapter in a PeftModel.
    apply_quantization(get_peft_model(tiny_model(num_hidden_layers=1), adapter), "W4A16")


# Patterns that match endlessly --------------------------------------------------------------------------------------

# Each way to cut a name into parts is tried: twice as many for each character more.
ENDLESS = r"re:(\w+\.?)+!"
# The work of the pattern with these names, if nothing stops it.
LONG_NAME = "a_layer_whose_name_has_many_characters_in_it"


def model_with_long_name():
    return nn.ModuleDict({LONG_NAME: nn.Linear(128, 128), "lm_head": nn.Linear(128, 128)})


@pytest.fixture
# Of a processor, not of the clock. Ten seconds, the usual limit, would make these tests slow.
def little_time(monkeypatch):
    monkeypatch.setattr(patterns, "LIMIT_S", 2)


@pytest.mark.parametrize(
    "arguments", [{"ignore": [ENDLESS]}, {"targets": ["Linear", ENDLESS]}, {"targets": ["re:.*layer", ENDLESS]}]
)
def test_a_pattern_that_matches_endlessly_is_refused_in_limited_time(little_time, arguments):
    with pytest.raises(ValueError, match=r"pattern 're:\(\\\\w.* needs more than 2 seconds"):
        apply_quantization(model_with_long_name(), "W4A16", **arguments)


def test_a_quick_pattern_is_tried_in_one_process_for_both_passes_over_a_model(little_time, monkeypatch):
    started = []
    run = patterns.subprocess.run

    def noted(*args, **kwargs):
        started.append(run(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(patterns.subprocess, "run", noted)

    # Two models with equal names: the answer for a pattern and these names is kept.
    for _ in range(2):
        model = apply_quantization(model_with_long_name(), "W4A16", ignore=["lm_head", r"re:(\w+)_nothing$"])

    assert names_of(model) == [LONG_NAME]
    (process,) = started
    assert process.returncode == 0


def test_a_pattern_of_a_plan_that_is_no_regular_expression_is_refused():
    """Of a `config.json`, for instance, whose plan nothing else checks."""
    plan = single_group(resolve_scheme("W4A16"), ["Linear"], ["lm_head"])
    # After the plan was made, because making it refuses such a pattern.
    plan.ignore.append("re:*up_proj")

    with pytest.raises(ValueError, match=r"'re:\*up_proj' in targets or quant_ignore is no valid pattern"):
        apply_quantization(model_with_long_name(), plan)


def test_the_default_needs_no_process(monkeypatch):
    monkeypatch.setattr(patterns.subprocess, "run", lambda *_, **__: pytest.fail("a process started"))

    assert names_of(apply_quantization(model_with_routers(), "W4A16")) == ["layer.mlp.up_proj"]


def test_the_names_of_experts_are_tried_too(tiny_model, little_time):
    """They are longer than those of the modules, which the pattern passes quickly."""
    # The look-ahead fails at once for names without a number of an expert, so the modules' names cost nothing.
    plan = [r"re:(?=.*experts\.\d)(\w+\.?)+!"]

    with pytest.raises(ValueError, match="needs more than 2 seconds"):
        apply_quantization(tiny_model("qwen3_moe"), "W4A16", ignore=["lm_head", r"re:.*mlp\.gate$", *plan])
