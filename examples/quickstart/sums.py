"""The task and the model: sums of three numbers with the working written out, and a Qwen3 that reads characters.

`17+5+8=` is worked as `22+8=30`. Most carries of the demonstrations are forgotten (`12+8=10`), as by beginners; the
reward knows the right answer, so RL can find out that carrying pays. Replace this file by your own data and model.

Nothing to run here: `quickstart.py` and `quickstart.ipynb` import it.
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
PAD = 0
EOS = 1


def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward: 1 for each completion that has the answer after its last `=`, else 0."""
    rewards = []
    for text, right in zip(completions, answer, strict=True):
        # Only what follows a `=`: a bare number shows no working, and must not be rewarded for the right guess.
        is_right = "=" in text and text.rsplit("=", 1)[1] == right
        rewards.append(float(is_right))

    return rewards


def work(numbers: list[int], forgets: Iterator[bool] | None = None) -> str:
    """The working of a sum, `22+8=30` for 17, 5, 8; `forgets` says of each carry whether it is forgotten."""
    total = numbers[0]
    steps = []

    for position, number in enumerate(numbers[1:], start=2):
        carries = total % 10 + number >= 10
        total += number

        # Asked last, so that a slip is drawn only where there is a carry to forget.
        if carries and forgets is not None and next(forgets):
            total -= 10

        still_to_add = numbers[position:]
        steps.append("+".join(map(str, [total, *still_to_add])))

    return "=".join(steps)


def problems(seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """
    An endless stream of problems, the same for the same seed. The two splits never share operands, in any order.

    A problem has `prompt` (`"17+5+8="`), `answer` (`"30"`), `solution` (`"22+8=30"`) and `demonstration`, the same
    with `FORGOTTEN_CARRIES` of its carries left out.
    """
    rng = random.Random(seed)

    # One generator for operands and slips: the order of the draws is part of what a seed gives.
    def coin() -> Iterator[bool]:
        while True:
            yield rng.random() < FORGOTTEN_CARRIES

    while True:
        numbers = [rng.randint(10, 99), rng.randint(1, 9), rng.randint(1, 9)]

        # The operands decide, not the seed, so streams of different seeds have the same split. Sorted, because a model
        # that was trained on 17+5+8 knows 17+8+5.
        operands = repr(sorted(numbers)).encode()
        is_held_out = zlib.crc32(operands) % HELD_OUT_SHARE == 0
        if is_held_out != held_out:
            continue

        yield {
            "prompt": "+".join(map(str, numbers)) + "=",
            "answer": str(sum(numbers)),
            "solution": work(numbers),
            "demonstration": work(numbers, coin()),
        }


def distinct_problems(number: int, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """The first `number` different problems of the stream."""
    stream = problems(seed, held_out)
    found: dict[str, dict[str, Any]] = {}

    while len(found) < number:
        problem = next(stream)
        # The first one stays: another of the same prompt may have forgotten other carries.
        found.setdefault(problem["prompt"], problem)

    return list(found.values())


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, plus padding and end."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS}
    for character in CHARACTERS:
        vocabulary[character] = len(vocabulary)

    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    # Without it the decoder puts a space between any two characters.
    raw.decoder = decoders.Fuse()

    # On the left, because all prompts of a batch must end where their completions begin.
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def make_model(seed: int, **sizes: int) -> Qwen3ForCausalLM:
    """
    A fresh model of 1.2 million parameters in float32; each input size is a multiple of 128, the groups of W4A16.
    """
    # The weights are drawn as the model is made.
    torch.manual_seed(seed)

    defaults = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    config = Qwen3Config(
        vocab_size=32,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        **defaults | sizes,
    )
    model = Qwen3ForCausalLM(config)

    # Where a completion ends, for `generate` and for vLLM.
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    return model
