"""The stages of `first_run.py`, each in a process of its own."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quant.schemes import decompressed, normal, same_tensors
from slow.toys import (
    engine_logprobs,
    learner_logprobs,
    make_tokenizer,
    make_trainer,
    sample,
    save_model,
    stored_tensors,
)

from qarl_trl.quant import (
    compiled,
    iter_low_bit_weights,
    quantize_weight,
    quantized_modules,
    resolve_scheme,
)
from qarl_trl.quant.quantize import dequantize
from qarl_trl.quant.scheme import SUPPORTED, gpu_generation
from qarl_trl.rollout.engine_gemm import GEMMS
from qarl_trl.rollout.sync_check import low_bit_forward


GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]
# Graphs of decoding alone and no compiler, which takes a minute that is not spent on what is measured.
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
# Of Qwen2.5-1.5B, with float32 master weights 6 GiB; and of Qwen2.5-0.5B for GPUs of less than 40 GiB.
LARGE = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
SMALL = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
TOY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}


class Run:
    """A stage in its process: the device, a folder for models, and figures that survive a kill."""

    def __init__(self, figures: str, dry: bool, folder: str) -> None:
        if not dry and not torch.cuda.is_available():
            raise RuntimeError("No CUDA device. With --dry the stages run on a CPU in toy sizes.")
        self.dry, self.device, self.folder = dry, torch.device("cpu" if dry else "cuda"), Path(folder)
        self.checked, self.failed, self._figures = 0, [], figures

    def record(self, **figures: Any) -> None:
        with open(self._figures, "a") as file:
            file.write(json.dumps({name.replace("_", " "): _short(value) for name, value in figures.items()}) + "\n")

    def check(self, name: str, holds: Any) -> None:
        """Note whether something holds. The stage goes on, and fails at its end."""
        self.checked += 1
        if not holds:
            self.failed.append(name)
        self.record(checks=f"{self.checked - len(self.failed)} of {self.checked} hold", do_not_hold=self.failed)

    def seconds(self, function: Callable[[], Any]) -> float:
        """Median seconds of five calls, after one that is not counted."""
        times = []
        for _ in range(6):
            start = time.perf_counter()
            function()
            if not self.dry:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def used_gib(self) -> float:
        """Memory of the device in use by anyone; 0 on a CPU."""
        free, total = (0, 0) if self.dry else torch.cuda.mem_get_info()
        return (total - free) / GIB


def run_in_this_process(function: str, settings: dict[str, Any], figures: str, dry: bool) -> None:
    """A stage, after which the process ends, whatever its engine has left running."""
    faulthandler.enable()
    code = 1
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(figures, dry, folder)
            globals()[function](run, **settings)
            code = 1 if run.failed else 0
    except BaseException as error:
        traceback.print_exc()
        with open(figures, "a") as file:
            file.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}) + "\n")
    sys.stdout.flush()
    os._exit(code)


def _short(value: Any) -> Any:
    """Numbers to four digits, also inside; those that JSON has no word for as text."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, (list, tuple)) else value


# Without an engine ----------------------------------------------------------------------------------------------------


def quantizer(run: Run) -> None:
    """Bytes of the compiled quantizer and dequantizer against eager ones and the CPU's, and their speed."""
    weight = normal(*((256, 1024) if run.dry else (2048, 8192)))
    for name in (name for name, row in SUPPORTED.items() if row.gpus):
        scheme, there = resolve_scheme(name), weight.to(run.device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = time.perf_counter()
            low_bit = quantize_weight(there, scheme)
            matrix = dequantize(low_bit)
            first = time.perf_counter() - start
        run.check(f"{name} is compiled", not any("torch.compile of" in str(w.message) for w in caught))
        on_cpu = quantize_weight(weight, scheme)
        run.check(
            f"{name}: bytes of the CPU", same_tensors({n: t.cpu() for n, t in low_bit.tensors.items()}, on_cpu.tensors)
        )
        run.check(f"{name}: decompressed as by compressed-tensors", torch.equal(matrix.cpu(), decompressed(on_cpu)))
        calls = (lambda s=scheme, w=there: quantize_weight(w, s)), (lambda w=low_bit: dequantize(w))
        times = {"compile s": first, "ms": [1e3 * run.seconds(call) for call in calls]}
        devices, compiled.DEVICES = compiled.DEVICES, ()
        run.check(f"{name}: bytes of eager", same_tensors(low_bit.tensors, quantize_weight(there, scheme).tensors))
        run.record(**{f"{name}, there and back": times | {"eager ms": [1e3 * run.seconds(call) for call in calls]}})
        compiled.DEVICES = devices


def gemms(run: Run) -> None:
    """`test_layers.py`: the learner's GEMMs and quantized activations against vLLM's kernels."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "tests/gpu/test_layers.py",
    ]
    result = subprocess.run(command + ["--collect-only"] * run.dry, cwd=ROOT, capture_output=True, text=True)
    print(result.stdout, result.stderr)
    lines = result.stdout.splitlines()
    run.record(outcome=lines[-1] if lines else "", failed=[line for line in lines if line.startswith("FAILED")])
    run.check("pytest passes", result.returncode == 0)


# With an engine -------------------------------------------------------------------------------------------------------


def engine(run: Run, scheme: str, sleep: bool = False, family: str = "Qwen3") -> None:
    """A short training run beside a toy engine, then log-probs of each learner, and syncs A, B, A."""
    if not run.dry and gpu_generation(torch.cuda.get_device_capability()) not in SUPPORTED[scheme].gpus:
        run.record(skipped=f"{scheme} needs one of {SUPPORTED[scheme].gpus}")
        return
    model = save_model(run.folder / "model", layers=4, family=family, norms=True)
    changes = {"quant_scheme": scheme, "use_cpu": run.dry, "max_completion_length": 32}
    if not run.dry:
        changes |= {
            "vllm_enable_sleep_mode": sleep,
            "vllm_engine_kwargs": GRAPHS if sleep else {"enforce_eager": True},
        }
    trainer = make_trainer(model, run.folder / "run", **changes)
    trainer.train()
    rollout, sleeps = trainer.vllm_generation, sleep and not run.dry
    logged = [row["mismatch/logp_diff_mean"] for row in trainer.state.log_history if "mismatch/logp_diff_mean" in row]
    run.record(logged_mismatch=logged)

    def sync(asleep: bool = False) -> None:
        """With sleep the engine's weights are thrown away first."""
        before = run.used_gib()
        if sleeps and not asleep:
            rollout.llm.sleep(level=2)
            run.record(sleep_frees_gib=before - run.used_gib())
        rollout.sync_weights()
        if sleeps:
            rollout.llm.wake_up(tags=["kv_cache"])

    sync(asleep=sleeps)  # training leaves it so
    compare_learners(run, trainer)
    first, repeated = engine_logprobs(rollout.llm), engine_logprobs(rollout.llm)
    master_weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    sync()
    other = engine_logprobs(rollout.llm)
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            p.copy_(master_weights[name])
    sync()
    run.check("the engine repeats itself", first == repeated)
    run.check("A, B, A answers as A", engine_logprobs(rollout.llm) == first)
    run.check("control: B answers otherwise", other != first)
    sent = dict(iter_low_bit_weights(trainer.model))
    trainer.save_model(run.folder / "saved")
    run.check(
        "saved is synced", same_tensors({n: t.cpu() for n, t in sent.items()}, stored_tensors(run.folder / "saved"))
    )


def compare_learners(run: Run, trainer: Any) -> None:
    """The mismatch between the engine's log-probs of its samples and those of each kind of learner."""
    samples = sample(trainer.vllm_generation.llm, 64, 32)
    sampled, learned = torch.cat([torch.tensor(values) for *_, values in samples]), {}
    for gemm in ("auto", "engine"):
        for _, layer in quantized_modules(trainer.model):
            layer.gemm_for = GEMMS[gemm]
            vars(layer).pop("_gemm", None)
        learned[gemm] = learner_logprobs(trainer.model, samples)
    with low_bit_forward(trainer.model, False):
        learned["bf16 learner"] = learner_logprobs(trainer.model, samples)
    mismatch = {name: (torch.cat(values) - sampled).abs().mean().item() for name, values in learned.items()}
    run.record(mismatch=mismatch)
    for name in ("auto", "engine"):
        run.check(f"learner {name} is nearer than the bf16 learner", mismatch[name] < mismatch["bf16 learner"])


def step(run: Run, scheme: str | None) -> None:
    """Two rollout batches in a real model's shape: seconds of each part, peaks, and what neither torch nor weights explain."""
    from transformers import AutoConfig, AutoModelForCausalLM

    total = 0 if run.dry else torch.cuda.mem_get_info()[1] / GIB
    sizes = TOY if run.dry else LARGE if total > 40 else SMALL
    tokenizer = make_tokenizer("0123456789+=")
    config = AutoConfig.for_model(
        "qwen2", **sizes, num_key_value_heads=2, vocab_size=64 if run.dry else 151936, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    folder = run.folder / "model"
    with run.device:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not run.dry:
        torch.cuda.empty_cache()
    context, length = run.used_gib(), 16 if run.dry else 256
    trainer = make_trainer(
        str(folder), run.folder / "run", quant_scheme=scheme, use_cpu=run.dry, max_completion_length=length,
        vllm_max_model_length=length + 64, generation_kwargs={"ignore_eos": True}, verify_sync="off", optim="sgd",
        per_device_train_batch_size=4 if run.dry else 16, vllm_engine_kwargs={"enforce_eager": True} if run.dry else GRAPHS,
        vllm_gpu_memory_utilization=0.3,
    )  # fmt: skip
    run.record(used_gib={"CUDA context": context, "with learner and engine": run.used_gib(), "of": total})
    trainer.train()
    rows = [row for row in trainer.state.log_history if "time/update" in row]
    run.record(seconds={part: [row[f"time/{part}"] for row in rows] for part in ("rollout", "sync", "update")})
    run.check("every step was taken", len(rows) == trainer.args.max_steps)
    if not run.dry:
        stats = torch.cuda.memory_stats()
        held, allocated = (stats[f"{kind}_bytes.all.peak"] / GIB for kind in ("reserved", "allocated"))
        # `plan` assumes 4 GiB for context, fragments and graphs, and 3 GiB for an awake engine's own work.
        run.record(peak_gib={"allocated by torch": allocated, "reserved": held, "fragments": held - allocated})
        run.record(used_beside_torch_gib=run.used_gib() - stats["reserved_bytes.all.current"] / GIB)
    if scheme:
        quantizing = run.seconds(
            lambda: [quantize_weight(m.weight, m.scheme) for _, m in quantized_modules(trainer.model)]
        )
        run.record(quantizing_all_layers_s=quantizing)
