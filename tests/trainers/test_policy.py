"""`qarl_trl.trainers.policy`: what a run makes of its model, also of one that an earlier run had."""

import torch

from qarl_trl.trainers.policy import quantize_policy
from trainers.test_settings import VLLM, LowBitGRPOConfig


TOKENS = torch.tensor([[3, 4, 5, 6, 7]])


def test_a_run_without_an_fp8_cache_forgets_that_of_an_earlier_run(tiny_model, tmp_path):
    """In a notebook the same model is given to the next trainer, whose engine has a cache in bfloat16."""
    model = tiny_model()
    stock = model(TOKENS).logits
    # Its own operations would be other roundings still.
    settings = VLLM | {"output_dir": str(tmp_path), "use_cpu": True, "learner_ops": "stock", "quant_scheme": "none"}

    quantize_policy(model, LowBitGRPOConfig(kv_cache_dtype="fp8", **settings), None)
    rounded = model(TOKENS).logits
    quantize_policy(model, LowBitGRPOConfig(**settings), None)

    assert torch.equal(model(TOKENS).logits, stock)
    assert not torch.equal(rounded, stock)  # control
