"""The task and the model: sums of three numbers with the working written out, and a Qwen3 that reads characters.

`17+5+8=` is worked as `22+8=30`. Most carries of the demonstrations are forgotten (`12+8=10`), as by beginners; the
reward knows the right answer, so RL can find out that carrying pays. Replace this file by your own data and model.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


CHARACTERS = "0123456789+="
FORGOTTEN_CARRIES = 0.6
HELD_OUT_SHARE = 5  # one problem in so many
PAD, EOS = 0, 1


def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward: 1 for each completion that has the answer after its last `=`, else 0."""
    return [
        float("=" in text and text.rsplit("=", 1)[1] == right) for text, right in zip(completions, answer, strict=True)
    ]


def work(numbers: list[int], forgets: Iterator[bool] | None = None) -> str:
    """The working of a sum, `22+8=30` for 17, 5, 8; `forgets` says of each carry whether it is forgotten."""
    steps, total = [], numbers[0]
    for i, number in enumerate(numbers[1:], start=2):
        carries = total % 10 + number >= 10
        total += number - (10 if carries and forgets is not None and next(forgets) else 0)
        steps.append("+".join(map(str, [total, *numbers[i:]])))
    return "=".join(steps)


def problems(seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """
    An endless stream of problems, the same for the same seed. The two splits never share operands, in any order.

    A problem has `prompt` (`"17+5+8="`), `answer` (`"30"`), `solution` (`"22+8=30"`) and `demonstration`, the same
    with `FORGOTTEN_CARRIES` of its carries left out.
    """
    rng = random.Random(seed)

    def coin() -> Iterator[bool]:
        while True:
            yield rng.random() < FORGOTTEN_CARRIES

    while True:
        numbers = [rng.randint(10, 99), rng.randint(1, 9), rng.randint(1, 9)]
        if (zlib.crc32(repr(sorted(numbers)).encode()) % HELD_OUT_SHARE == 0) == held_out:
            yield {
                "prompt": "+".join(map(str, numbers)) + "=",
                "answer": str(sum(numbers)),
                "solution": work(numbers),
                "demonstration": work(numbers, coin()),
            }


def distinct_problems(number: int, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """The first `number` different problems of the stream."""
    stream, found = problems(seed, held_out), {}
    while len(found) < number:
        problem = next(stream)
        found.setdefault(problem["prompt"], problem)
    return list(found.values())


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, plus padding and end."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def make_model(seed: int, **sizes: int) -> Qwen3ForCausalLM:
    """
    A fresh model of 1.2 million parameters in float32; each input size is a multiple of 128, the groups of W4A16.
    """
    torch.manual_seed(seed)
    defaults = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    special = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    config = Qwen3Config(vocab_size=32, tie_word_embeddings=False, **special, **defaults | heads | sizes)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    return model
