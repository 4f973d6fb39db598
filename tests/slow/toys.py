"""A small model on disk and a trainer around it: for tests with a real engine, and without pytest for tests/gpu."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch


CHARACTERS = "0123456789+=;# "
# Neither compiled nor captured in graphs: the learner's operations are not, either.
ENGINE = {"enforce_eager": True}
# Prompt, sampled tokens and their log-probs by the engine.
Sample = tuple[list[int], list[int], list[float]]


# On disk -------------------------------------------------------------------------------------------------------------


def make_tokenizer(characters: str = CHARACTERS) -> Any:
    """One token a character, after `<pad>` = 0 and `<eos>` = 1."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1}
    for index, character in enumerate(characters):
        vocabulary[character] = index + 2

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def save_model(
    folder: Path,
    layers: int = 2,
    seed: int = 0,
    experts: int = 0,
    family: str = "Qwen3",
    norms: bool = False,
    width: int = 256,
) -> str:
    """
    A Qwen3 model with weights so large that its next-token distribution is not uniform.

    With `experts` it is a Qwen3-MoE. `family="Qwen2"` has biases in q, k and v and tied embeddings here. `norms` makes
    the weights of its norms random: a factor of 1 hides where it is rounded. `width` is a multiple of 128.
    """
    import transformers

    sizes = {}
    if experts:
        family += "Moe"
        sizes = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 128}

    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    # All rows and columns are whole groups and blocks of 128, so that every scheme fits every layer.
    config = config_class(
        **sizes,
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=family == "Qwen2",
        initializer_range=0.05,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = model_class(config)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if norms and "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                # Biases start at zero, which would hide a lost one.
                parameter.copy_(0.5 * torch.randn_like(parameter))

    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def save_gptq(model: str, folder: Path) -> str:
    """`model` quantized to W4A16 by llm-compressor's GPTQ, calibrated on random tokens."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    # The model is random, so random tokens calibrate it as well as any text.
    torch.manual_seed(0)
    rows = torch.randint(2, 2 + len(CHARACTERS), (16, 32))
    columns = {"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()}
    oneshot(
        model=model,
        tokenizer=model,
        precision="bfloat16",
        dataset=Dataset.from_dict(columns),
        recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
        max_seq_length=32,
        num_calibration_samples=16,
        output_dir=str(folder),
    )
    return str(folder)


def forge(checkpoint: Path) -> None:
    """Write the sizes of the files into the manifest again, so that a checkpoint that was changed counts as whole."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())

    sizes = {}
    for name in manifest["files"]:
        file = checkpoint / name
        if file.exists():
            sizes[name] = file.stat().st_size

    manifest["files"] = sizes
    path.write_text(json.dumps(manifest))


def stored_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in one file."""
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def copies(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copies of tensors by name, of pairs such as `named_parameters` gives."""
    return {name: tensor.detach().clone() for name, tensor in named}


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """What an optimizer steps, by name: all parameters, or those of the adapter."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def decoder_of(model: torch.nn.Module) -> Any:
    """The decoder, which a causal language model wraps, and peft once more."""
    return next(module for module in model.modules() if hasattr(module, "rotary_emb"))


# A run ---------------------------------------------------------------------------------------------------------------


def distinct_characters(completions: list[str], **_: Any) -> list[float]:
    """A reward that every group of samples disagrees on."""
    return [float(len(set(completion))) for completion in completions]


def prompts(number: int = 64) -> Any:
    """A dataset of sums: "10+99=", "11+98=" and so on."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{10 + i}+{99 - i}="} for i in range(number)])


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a short run on the CPU engine, several updates to a rollout batch."""
    arguments = {
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
        # So large that four steps change quantized values of every layer, with bands to match (the paper's: 4e-4).
        "learning_rate": 1e-3,
        "tbpo_epsilon_high": 0.03,
        "tbpo_delta_low": 0.04,
        "tbpo_delta_high": 0.07,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return arguments | changes


def make_trainer(model: str, folder: Path, peft_config: Any = None, number: int = 64, **changes: Any) -> Any:
    """A `QaRLTrainer` of `settings` with `changes`, on `number` prompts."""
    from qarl_trl import QaRLConfig, QaRLTrainer

    args = QaRLConfig(**settings(folder, **changes))
    return QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(number), peft_config=peft_config)


def logged(trainer: Any, name: str) -> list[float]:
    """What a trainer logged under `name`, from the first step to the last."""
    return [row[name] for row in trainer.state.log_history if name in row]


def random_adapter(**changes: Any) -> Any:
    """LoRA on five of the seven layers of a block."""
    from peft import LoraConfig

    arguments = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
    return LoraConfig(task_type="CAUSAL_LM", **arguments | changes)


def randomize_adapter(model: torch.nn.Module, scale: float = 0.02, seed: int = 7) -> None:
    """B random too, so that the adapter is of the size of a trained one from the start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


# Log-probs of both sides ---------------------------------------------------------------------------------------------


def sample(llm: Any, number: int, tokens: int = 48, ignore_eos: bool = False) -> list[Sample]:
    """Samples of `number` prompts, which have three lengths, of at most `tokens` tokens each."""
    from vllm import SamplingParams

    # `logprobs=0`: of the sampled token alone.
    params = SamplingParams(temperature=1.0, max_tokens=tokens, logprobs=0, ignore_eos=ignore_eos)

    # Of one length they would need no padding, and a mistake with masks or positions would not show.
    texts = []
    for i, prompt in enumerate(prompts(number)["prompt"]):
        texts.append(prompt[i % 3 :])

    outputs = llm.generate(texts, params, use_tqdm=False)
    return list(map(as_sample, outputs))


def as_sample(output: Any) -> Sample:
    """The first answer to a request of vLLM."""
    answer = output.outputs[0]
    return list(output.prompt_token_ids), list(answer.token_ids), sampled_logps(answer)


def sampled_logps(answer: Any) -> list[float]:
    """Log-probs of an answer's own tokens: vLLM gives a dict by token for each place."""
    logps = []
    for step, token in zip(answer.logprobs, answer.token_ids, strict=True):
        logps.append(step[token].logprob)
    return logps


def logps_of_samples(samples: list[Sample]) -> list[torch.Tensor]:
    """Log-probs of the sampled tokens by the engine, a tensor a sample; `learner_logprobs` has the learner's."""
    return [torch.tensor(logps) for *_, logps in samples]


@torch.no_grad()
def learner_logprobs(model: torch.nn.Module, samples: list[tuple[list[int], list[int], Any]]) -> list[torch.Tensor]:
    """Log-probs of the same tokens by the learner, in batches padded as TRL pads them."""
    device = next(model.parameters()).device
    logps = []
    for batch in _batches(samples, 64):
        ids, mask, prompt_columns = _pad(batch)
        ids = ids.to(device)
        mask = mask.to(device)

        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=mask).logits

        # The logits of a column predict the token of the next one.
        predictions = logits[:, prompt_columns - 1 : -1].float().log_softmax(-1)
        answers = ids[:, prompt_columns:, None]
        of_answers = predictions.gather(-1, answers).squeeze(-1)

        # Without the columns after the end of each answer.
        for row, (_, answer, _) in enumerate(batch):
            logps.append(of_answers[row, : len(answer)].cpu())
    return logps


def _batches(samples: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def _pad(batch: list[tuple[list[int], list[int], Any]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Token ids and mask `(B, T)`, prompts padded on the left, answers on the right; and the columns of prompts."""
    prompts_of_batch, answers, _ = zip(*batch, strict=True)
    prompt_columns = max(map(len, prompts_of_batch))
    answer_columns = max(map(len, answers))
    ids = torch.zeros(len(batch), prompt_columns + answer_columns, dtype=torch.long)
    mask = torch.zeros_like(ids)

    for row, (prompt, answer, _) in enumerate(batch):
        first = prompt_columns - len(prompt)
        end = prompt_columns + len(answer)
        ids[row, first:end] = torch.tensor(prompt + answer)
        mask[row, first:end] = 1

    return ids, mask, prompt_columns


def sync(engine: Any) -> dict[str, torch.Tensor]:
    """Weight sync once; what was sent to the engine."""
    sent: dict[str, torch.Tensor] = {}
    stream = engine._iter_named_params

    def recorded() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream():
            sent.setdefault(name, tensor)
            yield name, sent[name]

    engine._iter_named_params = recorded
    engine.sync_weights()
    engine._iter_named_params = stream
    return sent


def fresh_engine_logprobs(path: str) -> tuple[list[list[int]], list[list[float]]]:
    """`engine_logprobs` of a new engine that loads the checkpoint at `path`."""
    from vllm import LLM

    sizes = {"max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 4096}
    return engine_logprobs(LLM(path, logprobs_mode="processed_logprobs", **ENGINE, **sizes))


def engine_logprobs(llm: Any, number: int = 6) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens of a few prompts and the log-probabilities of prompt and answer, as the engine gives them."""
    from vllm import SamplingParams

    # Answers of one length, whatever the weights are: two engines are compared token by token.
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    texts = prompts(number)["prompt"][:]

    tokens = []
    scores = []
    for output in llm.generate(texts, params, use_tqdm=False):
        answer = output.outputs[0]
        tokens.append(list(answer.token_ids))

        logps = []
        # The first token of a prompt has no log-prob.
        for step in filter(None, [*output.prompt_logprobs, *answer.logprobs]):
            logps.append(next(iter(step.values())).logprob)
        scores.append(logps)
    return tokens, scores
