"""A Qwen3 model of 1.2 million parameters and its character tokenizer, with all that a model of the Hub has."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .task import CHARACTERS


PAD, EOS = 0, 1


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, plus padding and end."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left")


SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}


def make_model(seed: int, **sizes: int) -> Qwen3ForCausalLM:
    """A fresh model in float32. Every input size of `SIZES` is a multiple of 128, the group size of W4A16."""
    torch.manual_seed(seed)
    special = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    config = Qwen3Config(vocab_size=32, tie_word_embeddings=False, **special, **SIZES | sizes)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    return model
