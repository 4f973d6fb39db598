"""Models without weights: they count the tensors of real ones, and bundled sizes give the models of these names."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from conftest import make_model
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from qarl_trl.quant import apply_quantization
from qarl_trl.quant.store import iter_low_bit_weights, low_bit_store
from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.memory.backward import _saved_for, layer_saved
from qarl_trl.tools.plan.memory.engine import synced_bytes
from qarl_trl.tools.plan.seconds.weights import expert_share
from tools.plan.runs import example_run, nbytes, resident


ROOT = Path(__file__).parents[3]


def quantized_bytes(model):
    """Bytes of the quantized values that the layers of a model keep."""
    total = 0
    for weight in low_bit_store(model).kept().values():
        total += nbytes(weight.tensors.values())
    return total


# Biases and zero points, 8-bit activations, and experts: each has tensors that the others do not.
@pytest.mark.parametrize(("kind", "scheme"), [("qwen2", "W4A16_ASYM"), ("qwen3", "W8A8"), ("qwen3_moe", "W4A16")])
def test_a_model_without_weights_counts_the_tensors_of_the_real_one(kind, scheme):
    model = apply_quantization(make_model(kind), scheme)
    skeleton = meta.model_without_weights(model.config, torch.float32, quantization=scheme)
    run = example_run(skeleton, model.config, muon=False)

    # Also makes the quantized values, which the store then keeps.
    streamed = dict(iter_low_bit_weights(model))

    assert synced_bytes(run) == nbytes(streamed.values())
    assert resident(run)["quantized values"] == quantized_bytes(model)
    assert resident(run)["master weights"] == nbytes(model.parameters())


@pytest.mark.parametrize(
    ("kind", "layers", "share"),
    [
        ("qwen3_next", ["linear_attention", "full_attention"], 2 / 8),
        ("lfm2", ["conv", "full_attention"], 1),
    ],
)
def test_a_convolution_is_not_taken_for_experts(kind, layers, share):
    """Its kernel has three dimensions, too: (channels, 1, width)."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2} if share < 1 else {}
    config = AutoConfig.for_model(kind, num_hidden_layers=2, layer_types=layers, **experts)
    skeleton = meta.model_without_weights(config, torch.float32)
    run = example_run(skeleton, config, muon=False)

    kernels = [parameter for parameter in run.in_layers if len(parameter.shape) == 3]
    experts = [parameter.name for parameter in kernels if parameter.holds_experts]

    assert len(experts) < len(kernels)
    assert all(".experts." in name for name in experts)
    assert expert_share(run) == share
    # A token passes all channels.
    kernel = next(parameter for parameter in kernels if not parameter.holds_experts)
    assert _saved_for(kernel, run) == 2 * kernel.shape[0] * run.compute
    # Ended in an AttributeError for a dense model.
    assert layer_saved(run) > 0


def test_a_model_of_text_and_images_is_refused_in_one_line():
    with pytest.raises(
        ValueError, match=r"plan knows what AutoModelForCausalLM builds, and qwen3_vl is no such model[^\n]*$"
    ):
        meta.model_without_weights(AutoConfig.for_model("qwen3_vl"), torch.float32)


def test_an_adapter_of_experts_leaves_them_experts():
    """PEFT keeps them in modules of its own."""
    config = make_model("qwen3_moe").config
    adapter = LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    plain = example_run(meta.model_without_weights(config, torch.float32), config, muon=False)
    adapted = example_run(meta.model_without_weights(config, torch.float32, adapter), config, muon=False)

    def stacks(run):
        return [parameter.shape for parameter in run.in_layers if parameter.holds_experts]

    assert stacks(adapted) == stacks(plain) != []


def test_a_sync_has_the_trained_copy_of_a_module_to_save_alone():
    """The learner keeps both, for the reference."""
    adapter = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = apply_quantization(get_peft_model(make_model("qwen3"), adapter), "W4A16")
    skeleton = meta.model_without_weights(model.config, torch.float32, adapter, quantization="W4A16")
    run = example_run(skeleton, model.config, muon=False)

    streamed = dict(iter_low_bit_weights(model))

    assert synced_bytes(run) == nbytes(streamed.values())


def test_an_adapter_without_weights_is_that_of_a_real_model_and_fills_nothing():
    """The adapter of 30B's experts took a minute of processor: PEFT drew its random numbers, to throw them away."""
    adapter = LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"], task_type="CAUSAL_LM")
    real = make_model("qwen3_moe")
    before = torch.get_rng_state()

    skeleton = meta.model_without_weights(real.config, torch.float32, adapter)

    assert torch.equal(torch.get_rng_state(), before)
    counted = meta.parameters(skeleton, "adamw_torch")
    assert counted == meta.parameters(get_peft_model(real, adapter), "adamw_torch")
    # Control: PEFT draws for the real one.
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def accelerator():
    """What accelerate's function reads of an `Accelerator` in the first of eight processes, which move nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False
    )
    yield SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="bf16",
        is_main_process=False,
        device=torch.device("cpu"),
        torch_device_mesh=init_device_mesh("cpu", (8,), mesh_dim_names=("shards",)),
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shards",)),
    )
    distributed.destroy_process_group()


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_accelerate_makes_what_is_trained_float32_in_mixed_precision(accelerator, precision):
    accelerator.mixed_precision = precision
    model = make_model("qwen3", dtype=torch.bfloat16)
    model.model.embed_tokens.requires_grad_(False)
    counted = meta.parameters(model, "adamw_torch", in_float32=precision == "bf16")

    sharded = fsdp2_prepare_model(accelerator, model)

    sizes = {name: param.element_size() for name, param in sharded.named_parameters()}
    assert sizes == {parameter.name: parameter.size for parameter in counted}
    # Control: both sizes come, or one.
    assert set(sizes.values()) == ({2, 4} if precision == "bf16" else {2})


# As the model cards count them.
PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "Qwen/Qwen2-0.5B": 494_032_768,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
}


@pytest.mark.parametrize("name", meta.BUNDLED)
def test_bundled_sizes_give_the_parameters_of_the_model_cards(name):
    skeleton = meta.model_without_weights(meta.read_config(name), torch.float32)
    parameters = meta.parameters(skeleton, "adamw_torch")

    assert sum(parameter.entries for parameter in parameters) == PARAMETERS[name]


def models_of_readme_and_recipes():
    """The models that README and the recipes name."""
    readme = (ROOT / "README.md").read_text()
    names = set(re.findall(r'"(Qwen/[\w.-]+)"', readme))

    for path in ROOT.glob("recipes/*/*.yaml"):
        names.update(re.findall(r"^model_name_or_path: (\S+)", path.read_text(), re.MULTILINE))
    return names


def test_models_that_are_named_need_no_download():
    names = models_of_readme_and_recipes()
    assert len(names) > 5

    # TRL's docs name these. Instruct and dated variants share the bundled sizes of their model.
    variants = {"Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen3-4B-Instruct-2507", "meta-llama/Llama-3.2-1B"}
    for name in names | variants:
        assert meta.read_config(name).hidden_size > 0

    # Control: the owner counts. A model of that name by somebody else may have other sizes.
    with pytest.raises(ValueError, match="nobody/Qwen3-8B"):
        meta.read_config("nobody/Qwen3-8B")
