"""The numbers of a run: a shard is what FSDP2 keeps."""

import pytest
import torch

from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.run import Parameter
from tools.plan.runs import example_run


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("shape", [(151936, 8), (7, 4, 2), (3,)])
def test_a_shard_is_what_fsdp2_keeps(ranks, shape):
    config = meta.read_config("Qwen/Qwen2.5-Math-1.5B")
    run = example_run(meta.model_without_weights(config, torch.float32), config, ranks=ranks, fsdp2=True)

    # `FSDPParam._init_sharded_param`: chunks of dimension 0, each padded to the first.
    first_chunk = torch.chunk(torch.empty(shape, device="meta"), ranks)[0]

    assert run.local_entries(Parameter("", shape, 4, "", "adamw")) == first_chunk.numel()
