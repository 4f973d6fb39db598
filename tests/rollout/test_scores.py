"""`qarl_trl.rollout.scores`: the prompt, and how engine and learner score it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qarl_trl.quant import apply_quantization
from qarl_trl.rollout.scores import LENGTH, engine_logps, learner_logps, rounding_noise, sync_check_tokens


def test_the_prompt_is_fixed_and_ordinary(tiny_tokenizer):
    tokens = sync_check_tokens(tiny_tokenizer, vocab_size=64)
    assert tokens == sync_check_tokens(tiny_tokenizer, vocab_size=64)
    assert len(tokens) == LENGTH
    assert 1 < min(tokens) <= max(tokens) < len(tiny_tokenizer)
    assert max(sync_check_tokens(tiny_tokenizer, vocab_size=8)) < 8
    assert len(sync_check_tokens(tiny_tokenizer, 64, length=9)) == 9


def test_the_engine_is_read_at_the_tokens_of_the_prompt():
    step = {5: SimpleNamespace(logprob=-1.5), 9: SimpleNamespace(logprob=-0.5)}
    llm = SimpleNamespace(
        generate=lambda prompts, params, use_tqdm: [SimpleNamespace(prompt_logprobs=[None, step, step])]
    )
    pytest.importorskip("vllm")
    assert engine_logps(llm, [9, 5, 9]).tolist() == [-1.5, -0.5]


@pytest.mark.parametrize("learner", [True, False])
def test_the_learner_is_read_in_low_bits_and_left_as_it_was(tiny_model, learner):
    model = apply_quantization(tiny_model(), "W4A16", quantize_forward=learner).train()
    ids = torch.randint(2, 64, (12,)).tolist()
    with torch.autocast("cpu", torch.bfloat16):
        first = learner_logps(model, ids)
        again = learner_logps(model, ids)
    plain = first.plain
    assert torch.equal(plain, again.plain)
    assert torch.equal(first.noisy, again.noisy)
    assert not torch.equal(plain, first.noisy)
    assert model.training
    assert all(m.quantized_forward is learner for _, m in model.named_modules() if hasattr(m, "quantized_forward"))
    assert not any(m._forward_hooks for m in model.modules())

    low_bit = apply_quantization(tiny_model(), "W4A16").eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = low_bit(input_ids=torch.tensor([ids])).logits[0].float()
    expected = torch.stack([logits[t].log_softmax(-1)[ids[t + 1]] for t in range(11)])
    torch.testing.assert_close(plain, expected, rtol=0, atol=0)


def test_the_noise_is_one_rounding_of_each_output():
    layer = nn.Linear(64, 4096)
    x = torch.randn(2, 64)
    with torch.no_grad():
        clean = layer(x)
        with rounding_noise(layer):
            relative = (layer(x) / clean - 1).abs()
        assert torch.equal(layer(x), clean)
    assert 0.9 * 2**-8 < relative.max() <= 1.01 * 2**-8
    assert relative.mean().item() == pytest.approx(2**-9, rel=0.1)
