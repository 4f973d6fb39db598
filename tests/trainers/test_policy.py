"""`qarl_trl.trainers.policy`: what a run makes of its model, also of one that an earlier run had."""

import pytest
import torch

from qarl_trl.cpu_exact.ops import has_engine_ops, use_engine_ops
from qarl_trl.quant.rest import rounded
from qarl_trl.trainers.policy import prepare_policy
from trainers.test_settings import VLLM, LowBitGRPOConfig


TOKENS = torch.tensor([[3, 4, 5, 6, 7]])


def test_a_run_without_an_fp8_cache_forgets_that_of_an_earlier_run(tiny_model, tmp_path):
    """In a notebook the same model is given to the next trainer, whose engine has a cache in bfloat16."""
    model = tiny_model()
    stock = model(TOKENS).logits
    # Its own operations would be other roundings still.
    settings = VLLM | {"output_dir": str(tmp_path), "use_cpu": True, "learner_ops": "stock", "quant_scheme": "none"}

    prepare_policy(model, LowBitGRPOConfig(kv_cache_dtype="fp8", **settings), None)
    with_cache = model(TOKENS).logits
    prepare_policy(model, LowBitGRPOConfig(**settings), None)

    assert torch.equal(model(TOKENS).logits, stock)
    assert not torch.equal(with_cache, stock)  # control


def test_a_run_beside_no_cpu_engine_forgets_the_operations_of_an_earlier_run(tiny_model, tmp_path):
    model = tiny_model()
    stock = model(TOKENS).logits
    use_engine_ops(model)

    args = LowBitGRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", quant_scheme="none")
    prepare_policy(model, args, None)

    assert not has_engine_ops(model)
    assert torch.equal(model(TOKENS).logits, stock)


@pytest.mark.parametrize(
    ("changes", "follows"),
    [
        ({"bf16": True}, True),
        # A learner in high precision, and one in float32.
        ({"bf16": True, "quantize_learner": False}, False),
        ({"bf16": True, "quant_scheme": "none"}, False),
        ({"bf16": False}, False),
        # Sharded weights are gathered in bfloat16.
        ({"bf16": True, "fsdp": True}, False),
    ],
)
def test_a_low_bit_learner_has_the_norms_and_embeddings_of_the_file(tiny_model, tmp_path, changes, follows):
    """Without the CPU engine's operations, as on a GPU. A sync and the file have them in bfloat16."""
    model = tiny_model()
    args = LowBitGRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **changes)
    master = model.model.norm.weight.detach() + 1e-3
    with torch.no_grad():
        model.model.norm.weight.copy_(master)
    states = torch.randn(1, 1, model.config.hidden_size)
    ones = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + model.model.norm.variance_epsilon)

    prepare_policy(model, args, args.quant_plan())

    assert torch.equal(model.model.norm(states), (rounded(master) if follows else master) * ones)
    assert (
        torch.equal(model.model.embed_tokens(TOKENS), model.model.embed_tokens(TOKENS).bfloat16().float()) == follows
    )
