"""`qarl_trl.rollout.sync_check.learner_logps`: the low-bit model is scored, and left as it was."""

import pytest
import torch

from qarl_trl.quant import apply_quantization
from qarl_trl.rollout.sync_check.learner_logps import learner_logps


@pytest.mark.parametrize("quantizes", [True, False])
def test_the_learner_is_read_in_low_bits_and_left_as_it_was(tiny_model, quantizes):
    model = apply_quantization(tiny_model(), "W4A16", quantize_forward=quantizes).train()
    ids = torch.randint(2, 64, (12,)).tolist()

    with torch.autocast("cpu", torch.bfloat16):
        first = learner_logps(model, ids)
        again = learner_logps(model, ids)

    # Noise comes from one seed.
    assert torch.equal(first.plain, again.plain)
    assert torch.equal(first.noisy, again.noisy)
    assert not torch.equal(first.plain, first.noisy)
    # In low bits even where the learner trains in high precision: the engine has only those.
    assert torch.equal(first.plain, logps_in_low_bits(tiny_model(), ids))

    assert model.training
    for module in model.modules():
        assert getattr(module, "quantized_forward", quantizes) is quantizes
        assert not module._forward_hooks


def logps_in_low_bits(model, ids):
    """The log-probs of the tokens after the first, one at a time, by a model that runs in W4A16."""
    low_bit = apply_quantization(model, "W4A16").eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = low_bit(input_ids=torch.tensor([ids])).logits[0].float()

    logps = []
    for place, token in enumerate(ids[1:]):
        logps.append(logits[place].log_softmax(-1)[token])
    return torch.stack(logps)
