"""`qarl_trl.rollout.scheme_support`: an engine that cannot compute as the learner does is refused early."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from configs import config
from peft import LoraConfig

from qarl_trl import QaRLTrainer
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.scheme import resolve_scheme, single_group
from qarl_trl.quant.supported import SUPPORTED
from qarl_trl.rollout import scheme_support
from qarl_trl.rollout.scheme_support import check_engine, default_engine_kwargs
from qarl_trl.validate import check_arguments


ON_CPU = [name for name, row in SUPPORTED.items() if row.cpu_engine]
NOT_ON_CPU = [name for name, row in SUPPORTED.items() if not row.cpu_engine]
# One GPU of each generation, by its compute capability.
GENERATIONS = {(7, 5): None, (8, 0): "Ampere", (8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


@pytest.mark.parametrize("scheme", ON_CPU)
def test_a_scheme_with_a_cpu_kernel_passes(tmp_path, scheme):
    check_arguments("org/model", config(tmp_path, use_vllm=True, quant_scheme=scheme), {})


@pytest.mark.parametrize("scheme", NOT_ON_CPU)
def test_a_scheme_without_a_cpu_kernel_is_refused_before_a_model_loads(tmp_path, scheme):
    args = config(tmp_path, use_vllm=True, quant_scheme=scheme)

    with pytest.raises(ValueError, match=f"quant_scheme={scheme!r}.*'cpu'.*use_vllm=False"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=args)

    # Control: without the engine it trains.
    check_arguments("org/model", config(tmp_path, quant_scheme=scheme), {})


@pytest.mark.parametrize("scheme", ON_CPU)
def test_a_frozen_base_on_a_cpu_needs_a_scheme_that_serves_adapters(tmp_path, scheme):
    """tests/slow/test_frozen.py runs the others."""
    args = config(tmp_path, use_vllm=True, quant_scheme=scheme, lora_base="frozen")
    arguments = {"peft_config": LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")}

    # The only scheme of the CPU engine in which it serves no adapter.
    if scheme == "W8A8":
        with pytest.raises(ValueError, match="lora_base must be 'merged' with quant_scheme='W8A8' on a CPU"):
            check_arguments("org/model", args, arguments)
    else:
        check_arguments("org/model", args, arguments)


def check_on_gpu(monkeypatch, scheme, capability=(9, 0), ranks=1, **engine):
    """`check_engine` as on a GPU of that capability."""
    # All that is asked of a GPU, so none is needed.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    plan = single_group(resolve_scheme(scheme), ["Linear"], [])
    args = SimpleNamespace(
        device=torch.device("cuda"), frozen=False, vllm_tensor_parallel_size=ranks, engine_kwargs=engine
    )
    check_engine(plan, args)


def test_the_oldest_vllm_is_for_hopper(monkeypatch):
    check_on_gpu(monkeypatch, "W4A16", (8, 0))  # control: the installed version

    # The oldest of the window.
    monkeypatch.setattr(scheme_support, "installed_version", lambda package: "0.26.0")

    check_on_gpu(monkeypatch, "W4A16", (9, 0))
    with pytest.raises(ValueError, match="vLLM 0.26.0 was run on Hopper only.*install vLLM 0.31"):
        check_on_gpu(monkeypatch, "W4A16", (8, 0))


@pytest.mark.parametrize("capability", GENERATIONS)
@pytest.mark.parametrize("scheme", SUPPORTED)
def test_a_scheme_needs_a_gpu_that_has_a_kernel(monkeypatch, scheme, capability):
    gpus = SUPPORTED[scheme].gpus
    if GENERATIONS[capability] in gpus:
        check_on_gpu(monkeypatch, scheme, capability)
        return

    with pytest.raises(ValueError, match=rf"quant_scheme='{scheme}' cannot be sampled on device 'cuda'") as error:
        check_on_gpu(monkeypatch, scheme, capability)

    message = str(error.value)
    if gpus:
        for words in (*gpus, str(capability)):
            assert words in message
    else:
        assert "no GPU kernel" in message


@pytest.mark.parametrize(("scheme", "warns"), [("W4A16", False), ("FP8_DYNAMIC", True)])
def test_several_engine_ranks_scale_a_token_in_parts(monkeypatch, caplog, scheme, warns):
    PartialState()  # which the logger asks for

    # Control: one rank has whole tokens.
    check_on_gpu(monkeypatch, scheme)
    assert not caplog.text

    # Each rank sees a part of a token, and takes the scale of that part.
    check_on_gpu(monkeypatch, scheme, ranks=2)
    assert (f"vllm_tensor_parallel_size=2 with {scheme}" in caplog.text) is warns


@pytest.mark.parametrize(
    ("kind", "scheme"), [("qwen3_moe", "FP8_DYNAMIC"), ("qwen3_moe", "W4A16"), ("qwen3", "FP8_DYNAMIC")]
)
def test_engines_run_with_graphs(tiny_model, kind, scheme):
    """Also those of experts with quantized inputs. With the engine's operations: `tests/slow/test_invariants.py`."""
    model = apply_quantization(tiny_model(kind, num_hidden_layers=1), scheme)

    assert default_engine_kwargs(model) == {}
