"""A frozen base: the engine is the checkpoint bit for bit, then checkpoint and adapter.

A sync has the bytes of the adapter alone.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slow.isolated import isolated, isolated_group
from slow.processes import FLOOR, FSDP2, as_bytes, shard_on_cpu
from slow.toys import (
    engine_logprobs,
    fresh_engine_logprobs,
    learner_logprobs,
    logged,
    logps_of_samples,
    make_trainer,
    random_adapter,
    randomize_adapter,
    sample,
    save_gptq,
    save_model,
    stored_tensors,
    sync,
    trained_parameters,
)


pytestmark = pytest.mark.slow
# Of engines beside the trainer's.
SHAPES = {"max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 4096}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """What llm-compressor's GPTQ made."""
    pytest.importorskip("llmcompressor")
    folder = tmp_path_factory.mktemp("gptq")
    return isolated(save_gptq, save_model(folder / "model", norms=True), folder / "gptq")


def _frozen_trainer(model: str, folder: Path, **changes: Any) -> Any:
    settings = {"quant_scheme": "checkpoint", "lora_base": "frozen", "verify_sync": "1"}
    return make_trainer(model, folder, random_adapter(), **settings | changes)


def _low_bit_tensors(trainer: Any) -> dict[str, torch.Tensor]:
    """The learner's base, by names of the checkpoint."""
    from qarl_trl.quant import iter_low_bit_weights

    return dict(iter_low_bit_weights(trainer.accelerator.unwrap_model(trainer.model)))


def _logged_logp_diffs(trainer: Any) -> list[float]:
    return logged(trainer, "mismatch/logp_diff_mean")


def _part_of(base: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> bool:
    """Whether each tensor of the base is there with its numbers; there may be others."""
    return all(torch.equal(tensors[name], tensor) for name, tensor in base.items())


# Biases --------------------------------------------------------------------------------------------------------------


def _run_with_biases(model: str, folder: str, scheme: str) -> list[float]:
    trainer = _frozen_trainer(model, Path(folder), quant_scheme=scheme, max_steps=4)
    randomize_adapter(trainer.model)
    trainer.train()
    return _logged_logp_diffs(trainer)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16"])
def test_a_base_with_biases_is_loaded_below_the_wrappers_of_an_adapter(tmp_path, scheme):
    """A wrapper shows the bias of the layer inside, and has none of its own to fill."""
    model = save_model(tmp_path / "model", family="Qwen2")

    logp_diffs = isolated(_run_with_biases, model, str(tmp_path / "run"), scheme)

    assert len(logp_diffs) == 2
    assert max(logp_diffs) < FLOOR


# Requests ------------------------------------------------------------------------------------------------------------


def _answers_by_each_way(model: str, folder: str) -> dict[str, list[int]]:
    """The greedy answer to one prompt by each way that a `rollout_func` may ask."""
    from vllm import SamplingParams

    trainer = _frozen_trainer(model, Path(folder), quant_scheme="FP8_DYNAMIC")
    randomize_adapter(trainer.model, scale=0.3)
    trainer.vllm_generation.sync_weights()
    llm = trainer.vllm_generation.llm

    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompt = "10+99="
    messages = [{"role": "user", "content": prompt}]
    template = "{{ messages[0]['content'] }}"
    # Nothing after the prompt: the same tokens as for `generate`.
    as_text = {"chat_template": template, "add_generation_prompt": False, "use_tqdm": False}

    outputs = {
        "generate": llm.generate([prompt], params, use_tqdm=False),
        "chat": llm.chat(messages, params, **as_text),
        "the base by chat": llm.chat(messages, params, lora_request=None, **as_text),
    }
    llm.enqueue([prompt], params, use_tqdm=False)
    outputs["enqueue"] = llm.wait_for_completion(use_tqdm=False)
    return {way: list(output.outputs[0].token_ids) for way, (output,) in outputs.items()}


def test_whoever_asks_the_engine_gets_answers_of_the_adapter(tmp_path):
    """TRL asks by `generate` alone, a `rollout_func` also by other methods: they would answer with the base."""
    model = save_model(tmp_path / "model", layers=1)

    answers = isolated(_answers_by_each_way, model, str(tmp_path / "run"))

    assert answers["chat"] == answers["enqueue"] == answers["generate"]
    assert answers["the base by chat"] != answers["generate"]  # control


# One engine ----------------------------------------------------------------------------------------------------------


def _run(model: str, folder: str) -> dict[str, Any]:
    """All questions to one engine. Their order matters: each part begins with the weights that the one before left."""
    trainer = _frozen_trainer(model, Path(folder))
    engine = trainer.vllm_generation
    base = stored_tensors(model)

    first_sync = sync(engine)
    first_bytes = engine.synced_bytes
    facts: dict[str, Any] = {
        "base was sent as stored": _part_of(base, first_sync),
        "only adapters besides": _only_adapters(first_sync.keys() - base.keys()),
        "untrained": engine_logprobs(engine.llm),
    }

    randomize_adapter(trainer.model)
    adapter = sync(engine)
    # An engine takes an adapter in bfloat16, and the learner has it in float32.
    numbers = sum(param.numel() for param in trained_parameters(trainer.model).values())
    facts |= {
        "only adapters in the second": _only_adapters(adapter),
        "bytes": {"first": first_bytes, "second": engine.synced_bytes, "adapter": 2 * numbers},
    }

    # What the engine answers with the first adapter; later parts come back to it.
    answers = engine_logprobs(engine.llm)
    samples = sample(engine.llm, 64)
    facts["mismatch"] = _mismatch(samples, trainer.model)
    facts["mismatch of a merged base"] = _mismatch(samples, _merged(model, adapter))
    facts |= _change_adapters(trainer, answers, samples)
    facts |= _sleep(engine, answers)
    facts |= _train(trainer, base)
    return facts


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name


def _only_adapters(names: Any) -> bool:
    """Whether there are names, all of them of tensors of an adapter."""
    return len(names) > 0 and all(map(_is_of_adapter, names))


def _mismatch(samples: list, learner: Any) -> dict[str, float]:
    """Mean distance of the log-probs, and the share of those that are unequal."""
    engine_logps = torch.cat(logps_of_samples(samples))
    difference = (engine_logps - torch.cat(learner_logprobs(learner, samples))).abs()
    return {"mean": difference.mean().item(), "unequal": (difference > 0).float().mean().item()}


def _merged(model: str, adapter: dict[str, torch.Tensor]) -> Any:
    """What a base with the adapter merged, and quantized again, would be."""
    from qarl_trl.quant import apply_quantization
    from qarl_trl.quant.start import load_master_weights

    merged = load_master_weights(model)
    with torch.no_grad():
        for name, factor_a in adapter.items():
            if name.endswith("lora_A.weight"):
                factor_b = adapter[name.replace("lora_A", "lora_B")]
                layer = merged.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                # Without a factor: a sync sends B with the scale of the adapter in it.
                layer.weight += factor_b.float() @ factor_a.float()
    return apply_quantization(merged, "W4A16").eval()


def _change_adapters(trainer: Any, answers: Any, samples: list) -> dict[str, Any]:
    """Another adapter, then the first one again: what a check says before a sync, what the engine answers after it."""
    engine = trainer.vllm_generation
    randomize_adapter(trainer.model, seed=8)
    mismatch = _mismatch(samples, trainer.model)
    # The engine still has the first adapter, and one of two checks must say so, in either way.
    with pytest.raises(RuntimeError, match="stale|At most"):
        engine.sync_check.check(engine.prompt_logps, 2)
        engine.sync_check.check(engine.prompt_logps, 3)

    engine.sync_weights()
    moved = engine_logprobs(engine.llm) != answers

    randomize_adapter(trainer.model)
    engine.sync_weights()
    back = engine_logprobs(engine.llm) == answers
    return {"mismatch of another adapter": mismatch, "moved": moved, "back": back}


def _sleep(engine: Any, answers: Any) -> dict[str, Any]:
    """What a sync sends to an engine that lost its weights, and whether `answers` come back."""
    _forget(engine.llm)
    check = engine.sync_check
    engine.sync_check = None  # it would stop the run here
    engine.sync_weights()
    engine.sync_check = check
    facts = {"adapter alone after a sleep": engine_logprobs(engine.llm) == answers}

    # Now the sync takes the engine for one that slept, and sends the base again.
    engine.enable_sleep_mode = True
    engine.llm.wake_up = lambda tags: None
    sent = sync(engine)
    engine.enable_sleep_mode = False
    of_adapter = list(filter(_is_of_adapter, sent))
    facts["adapter and base were sent after a sleep"] = 0 < len(of_adapter) < len(sent)
    facts["after a sleep"] = engine_logprobs(engine.llm) == answers
    return facts


def _forget(llm: Any) -> None:
    """Write other numbers into all weights and the adapter, as after a sleep of level 2: a CPU engine cannot sleep."""
    from qarl_trl.rollout.vllm import reloading

    model = reloading.engine_model(llm)
    tensors: list[torch.Tensor] = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        # Rotary embeddings are computed, not synced.
        if "rotary" not in name:
            tensors.append(tensor)

    # The places for adapters are neither parameters nor buffers of vLLM's layers.
    for module in model.modules():
        tensors += getattr(module, "lora_a_stacked", ())
        tensors += getattr(module, "lora_b_stacked", ())

    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(-1)


def _train(trainer: Any, base: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A run of four steps; the adapter is saved, and the engine has it."""
    trainer.train()
    kept = _part_of(_low_bit_tensors(trainer), base)

    # The last sync of the run was before its last updates.
    trainer.vllm_generation.sync_weights()
    trainer.save_model()
    return {
        "logp_diffs": _logged_logp_diffs(trainer),
        "sync bytes": set(logged(trainer, "sync/bytes")),
        "kept": kept,
        "trained": engine_logprobs(trainer.vllm_generation.llm),
    }


def _served(base: str, adapter: str) -> Any:
    """Answers of a new engine, as `vllm serve BASE --enable-lora --lora-modules` would give them."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    llm = LLM(
        base,
        logprobs_mode="processed_logprobs",
        enforce_eager=True,
        enable_lora=True,
        # vLLM 0.31 fails at the log-probs of a prompt where it adapts the output layer too, which it does by default.
        lora_target_modules=sorted(random_adapter().target_modules),
        **SHAPES,
    )
    llm.generate = partial(llm.generate, lora_request=LoRARequest("policy", 1, adapter))
    return engine_logprobs(llm)


def _evaluated(base: str, adapter: str | None) -> Any:
    """Answers of the engine that `qarl-trl eval` starts."""
    from qarl_trl.tools.evaluate.sample import start_engine

    folder = None if adapter is None else Path(adapter)
    return engine_logprobs(start_engine(base, folder, logprobs_mode="processed_logprobs", **SHAPES))


def _adapter_that_ends_at(checkpoint: str, folder: str) -> int:
    """Save an adapter whose tokenizer has another end token than that of its base."""
    from transformers import AutoTokenizer

    trainer = _frozen_trainer(checkpoint, Path(folder), use_vllm=False)
    trainer.save_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "5"
    tokenizer.save_pretrained(folder)
    return tokenizer.eos_token_id


def _sampled(base: str, adapter: str) -> list[list[int]]:
    """Token ids of answers of the engine that `qarl-trl eval` starts."""
    from vllm import SamplingParams

    from qarl_trl.tools.evaluate.sample import sample as sample_problems
    from qarl_trl.tools.evaluate.sample import start_engine

    params = SamplingParams(n=32, temperature=1.0, max_tokens=32)
    (answers,) = sample_problems(start_engine(base, Path(adapter), **SHAPES), [{"prompt_ids": [3, 4]}], params, seed=0)
    return [answer["token_ids"] for answer in answers]


def test_an_evaluated_adapter_ends_where_its_training_did(checkpoint, tmp_path):
    adapter = tmp_path / "adapter"
    end = isolated(_adapter_that_ends_at, checkpoint, str(adapter))

    assert not any(end in answer[:-1] for answer in isolated(_sampled, checkpoint, str(adapter)))

    # Control: by the tokenizer of the base they go on.
    for file in adapter.glob("tokenizer*"):
        file.unlink()
    assert any(end in answer[:-1] for answer in isolated(_sampled, checkpoint, str(adapter)))


def test_engine_learner_and_files_are_one_base_and_one_adapter(checkpoint, tmp_path, monkeypatch):
    # With AMX, oneDNN rounds the product of one token with B unlike that of many: 1 of 2,369 log-probs would differ
    # (docs/numerics.md).
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

    facts = isolated(_run, checkpoint, str(tmp_path))

    assert facts["base was sent as stored"]
    assert facts["only adapters besides"]
    assert facts["untrained"] == isolated(fresh_engine_logprobs, checkpoint)

    sizes = facts["bytes"]
    assert facts["only adapters in the second"]
    assert facts["sync bytes"] == {sizes["adapter"]}
    # The first sync has the base as well.
    assert sizes["second"] == sizes["adapter"] < sizes["first"] / 4

    # Adapters one, two and one again.
    assert facts["moved"]
    assert facts["back"]
    assert facts["kept"]

    # A sleeping engine drops the base as well, which therefore comes with each adapter.
    assert facts["after a sleep"]
    assert facts["adapter and base were sent after a sleep"]
    assert not facts["adapter alone after a sleep"]  # control

    assert facts["mismatch"]["unequal"] == 0
    assert max(facts["logp_diffs"]) < 1e-6  # two formulas of a log-softmax: measured 1e-7
    # Controls: other weights are found, a base that was merged and quantized again among them.
    assert facts["mismatch of another adapter"]["mean"] > 0.1
    assert facts["mismatch of a merged base"]["mean"] > 0.01

    assert isolated(_served, checkpoint, str(tmp_path)) == facts["trained"]
    assert isolated(_evaluated, checkpoint, str(tmp_path)) == facts["trained"]
    # The control.
    assert isolated(_evaluated, checkpoint, None) == facts["untrained"] != facts["trained"]


# Two processes -------------------------------------------------------------------------------------------------------


def _rank(model: str, folder: str, fsdp: bool) -> dict[str, Any]:
    """One process's part of a run: its mismatches, the adapter that it sends, and its base."""
    torch.set_num_threads(1)
    changes: dict[str, Any] = {"quant_scheme": "W4A16", "max_steps": 2}
    if fsdp:
        os.environ.update(FSDP2)
        shard_on_cpu()
        changes |= {"learner_ops": "stock", "save_strategy": "steps", "save_steps": 1}

    trainer = _frozen_trainer(model, Path(folder), **changes)
    trainer.train()
    trainer.save_model()

    return {
        "processes": (str(trainer.accelerator.distributed_type), trainer.accelerator.num_processes),
        "sharded": sum(hasattr(param, "full_tensor") for param in trained_parameters(trainer.model).values()),
        "logp_diffs": _logged_logp_diffs(trainer),
        "adapter": as_bytes(sync(trainer.vllm_generation).items()),
        "base": as_bytes(_low_bit_tensors(trainer).items()),
    }


@pytest.mark.alone
@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
def test_two_processes_train_one_adapter_on_a_base_quantized_as_it_loads(tmp_path, fsdp):
    """FSDP2 shards embeddings, norms and the adapter; its learner has transformers' operations, as on a GPU."""
    model = save_model(tmp_path / "model", layers=1)

    one, two = isolated_group(_rank, 2, model, str(tmp_path / "run"), fsdp)

    assert one["processes"] == (f"DistributedType.{'FSDP' if fsdp else 'MULTI_CPU'}", 2)
    assert one["sharded"] == (len(one["adapter"]) if fsdp else 0)
    assert 0 < max(one["logp_diffs"]) < (FLOOR if fsdp else 1e-6)
    _assert_equal_bytes(one["adapter"], two["adapter"])
    _assert_equal_bytes(one["base"], two["base"])
    assert _only_adapters(one["adapter"])
    # Control: it has moved. Each B starts at zero.
    assert any(factor.any() for name, factor in one["adapter"].items() if "lora_B" in name)

    _assert_equal_bytes(as_bytes(stored_tensors(tmp_path / "run" / "base").items()), one["base"])
    for name, tensor in load_file(tmp_path / "run" / "adapter_model.safetensors").items():
        scale = 4 if "lora_B" in name else 1  # the engine's B is scaled
        sent = (tensor.bfloat16() * scale).view(torch.uint8).numpy()
        assert (sent == one["adapter"][name]).all()


def _assert_equal_bytes(some: dict[str, Any], others: dict[str, Any]) -> None:
    assert some.keys() == others.keys()
    for name, array in some.items():
        assert (array == others[name]).all(), name
