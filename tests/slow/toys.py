"""A small model on disk and a trainer around it, for tests with a real engine and for stages on a GPU (so: no pytest)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


CHARACTERS = "0123456789+=;# "
ENGINE = {"enforce_eager": True}


def make_tokenizer(characters: str = CHARACTERS) -> Any:
    """One token a character, after `<pad>` = 0 and `<eos>` = 1."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1} | {c: i + 2 for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def save_model(
    folder: Path, layers: int = 2, seed: int = 0, experts: int = 0, family: str = "Qwen3", norms: bool = False
) -> str:
    """
    A Qwen3 model with weights so large that its next-token distribution is not uniform.

    With `experts` it is a Qwen3-MoE. `family="Qwen2"` has biases in q, k and v and tied embeddings here. `norms` makes the
    weights of its norms random: a factor of 1 hides where it is rounded.
    """
    import transformers

    family += "Moe" if experts else ""
    kind, architecture = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}ForCausalLM")
    sizes = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 128} if experts else {}
    config = kind(
        **sizes,
        vocab_size=64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=family == "Qwen2",
        initializer_range=0.05,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = architecture(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if norms and "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def save_gptq(model: str, folder: Path) -> str:
    """`model` quantized to W4A16 by llm-compressor's GPTQ, calibrated on random tokens."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    torch.manual_seed(0)
    rows = torch.randint(2, 2 + len(CHARACTERS), (16, 32))
    oneshot(
        model=model,
        tokenizer=model,
        precision="bfloat16",
        dataset=Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()}),
        recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
        max_seq_length=32,
        num_calibration_samples=16,
        output_dir=str(folder),
    )
    return str(folder)


def forge(checkpoint: Path) -> None:
    """Write the sizes of the files into the manifest again, so that a checkpoint that was changed counts as whole."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    left = [checkpoint / name for name in manifest["files"] if (checkpoint / name).exists()]
    manifest["files"] = {str(file.relative_to(checkpoint)): file.stat().st_size for file in left}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def stored_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in one file."""
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def distinct_characters(completions: list[str], **_: Any) -> list[float]:
    """A reward that every group of samples disagrees on."""
    return [float(len(set(completion))) for completion in completions]


def prompts(number: int = 64) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{10 + i}+{99 - i}="} for i in range(number)])


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a short run on the CPU engine, several updates to a rollout batch."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "use_vllm": True,
        "vllm_max_model_length": 64,
        "vllm_engine_kwargs": ENGINE,
        "max_completion_length": 24,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "steps_per_generation": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "tbpo_epsilon_high": 0.03,
        "tbpo_delta_low": 0.04,
        "tbpo_delta_high": 0.07,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    } | changes


def make_trainer(model: str, folder: Path, peft_config: Any = None, number: int = 64, **changes: Any) -> Any:
    from qarl_trl import QaRLConfig, QaRLTrainer

    args = QaRLConfig(**settings(folder, **changes))
    return QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(number), peft_config=peft_config)


def random_adapter(**changes: Any) -> Any:
    """LoRA on five of the seven layers of a block."""
    from peft import LoraConfig

    settings = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
    return LoraConfig(task_type="CAUSAL_LM", **settings | changes)


def randomize_adapter(model: torch.nn.Module, scale: float = 0.02, seed: int = 7) -> None:
    """B random too, so that the adapter is of the size of a trained one from the start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * scale)


def sample(
    llm: Any, number: int, tokens: int = 48, ignore_eos: bool = False
) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, sampled tokens and their log-probs by the engine; prompts of three lengths."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=tokens, logprobs=0, ignore_eos=ignore_eos)
    texts = [row["prompt"][i % 3 :] for i, row in enumerate(prompts(number))]
    answers = [(o.prompt_token_ids, o.outputs[0]) for o in llm.generate(texts, params, use_tqdm=False)]
    return [
        (list(prompt), list(a.token_ids), [step[t].logprob for step, t in zip(a.logprobs, a.token_ids, strict=True)])
        for prompt, a in answers
    ]


@torch.no_grad()
def learner_logprobs(model: torch.nn.Module, samples: list[tuple[list[int], list[int], Any]]) -> list[torch.Tensor]:
    """Log-probs of the same tokens by the learner, in batches padded as TRL pads them."""
    found, device = [], next(model.parameters()).device
    for start in range(0, len(samples), 64):
        batch = samples[start : start + 64]
        left, right = (max(len(row[i]) for row in batch) for i in (0, 1))
        ids, mask = torch.zeros(2, len(batch), left + right, dtype=torch.long)
        for row, (prompt, answer, _) in enumerate(batch):
            begin, end = left - len(prompt), left + len(answer)
            ids[row, begin:end], mask[row, begin:end] = torch.tensor(prompt + answer), 1
        ids, mask = ids.to(device), mask.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=mask).logits
        logps = logits[:, left - 1 : -1].float().log_softmax(-1).gather(-1, ids[:, left:, None]).squeeze(-1)
        found += [logps[row, : len(answer)].cpu() for row, (_, answer, _) in enumerate(batch)]
    return found


def sync(engine: Any) -> dict[str, torch.Tensor]:
    """Weight sync once; what was sent to the engine."""
    sent: dict[str, torch.Tensor] = {}
    stream = engine._iter_named_params
    engine._iter_named_params = lambda: ((n, sent.setdefault(n, t)) for n, t in stream())
    engine.sync_weights()
    engine._iter_named_params = stream
    return sent


def fresh_engine_logprobs(path: str) -> tuple[list[list[int]], list[list[float]]]:
    """`engine_logprobs` of a new engine that loads the checkpoint at `path`."""
    from vllm import LLM

    settings = {"max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 4096}
    return engine_logprobs(LLM(path, logprobs_mode="processed_logprobs", **ENGINE, **settings))


def engine_logprobs(llm: Any, number: int = 6) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens of a few prompts and the log-probabilities of prompt and answer, as the engine gives them."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    outputs = llm.generate([row["prompt"] for row in prompts(number)], params, use_tqdm=False)
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    scores = []
    for output in outputs:
        steps = [step for step in [*output.prompt_logprobs, *output.outputs[0].logprobs] if step]
        scores.append([next(iter(step.values())).logprob for step in steps])
    return tokens, scores
