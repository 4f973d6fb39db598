"""What a plan counts of a rank, against a toy trainer after an update: tensor bytes, exactly."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from slow.toys import save_model
from test_trainer import make

from qarl_trl.quant.model import quantized_modules
from qarl_trl.tools.plan import formulas, rank
from qarl_trl.tools.plan import model as meta
from tools.plan.runs import example_run


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    kinds = {"dense": 0, "experts": 4}
    return {kind: save_model(tmp_path_factory.mktemp(kind), layers=1, experts=n) for kind, n in kinds.items()}


def counted(trainer):
    """Bytes of the master weights, of the optimizer's state and of the quantized values of a real trainer."""
    model, state = trainer.model, trainer.optimizer.optimizer.state
    tensors = [t for of_parameter in state.values() for t in of_parameter.values() if isinstance(t, torch.Tensor)]
    weights = [w for _, m in quantized_modules(model) for w in m.last_low_bits().values()]
    return {
        "master weights": sum(p.nbytes for p in model.parameters()),
        "optimizer state": sum(t.nbytes for t in tensors),
        "quantized values (whole)": sum(w.num_bytes() for w in weights),
    }


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dense", {}),
        ("dense", {"optim_muon": True}),
        ("experts", {"optim_muon": True}),
        ("dense", {"lora": True}),
    ],
)
def test_tensors_of_a_trainer_after_an_update(folders, tmp_path, kind, changes):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if changes.pop("lora", False) else None
    settings = {"max_steps": 1, "export_low_bit": False, **changes}
    trainer = make(folders[kind], tmp_path, peft_config=adapter, **settings)
    gradients, clear = [], trainer.model.zero_grad

    def zero_grad(*args):
        gradients.append(sum(p.grad.nbytes for p in trainer.model.parameters() if p.grad is not None))
        clear(*args)

    trainer.model.zero_grad = zero_grad
    trainer.train()
    config = meta.read_config(folders[kind])
    skeleton = meta.skeleton(config, torch.float32, adapter, trainer.args.quant_plan())
    muon = trainer.args.optim_muon
    run = example_run(skeleton, config, muon, half=False)
    found = {name: size for name, size in counted(trainer).items() if size}
    print("trainer", kind, found, "gradients", max(gradients))
    assert rank.resident(run) == found
    assert rank.gradients(run) == max(gradients)
    other = meta.parameters(skeleton, muon=not muon)
    if adapter is None:  # control
        assert rank.resident(replace(run, parameters=other))["optimizer state"] != found["optimizer state"]


@pytest.fixture(scope="module")
def eight_billion():
    config = meta.read_config("Qwen/Qwen3-8B-Base")
    return example_run(meta.skeleton(config, torch.float32, plan="W4A16"), config)


def test_8b_by_hand(eight_billion):
    """8.19 billion float32 master weights; Muon for 6.95 billion entries in layers, AdamW for two matrices of 151936 x 4096."""
    hidden = 36 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12288)
    rest = 8_190_735_360 - hidden
    tensors = 2 + 1 + 36 * 4
    stays = rank.resident(eight_billion)
    assert stays["master weights"] == 4 * 8_190_735_360
    assert stays["optimizer state"] == 4 * hidden + 8 * rest + 4 * tensors
    packed = hidden // 2 + 2 * hidden // 128 + 16 * 36 * 7
    assert stays["quantized values (whole)"] == packed
    assert eight_billion.synced == packed + 2 * rest
    sharded = replace(eight_billion, ranks=8, sharded=True)
    assert rank.resident(sharded)["master weights"] == 4 * 8_190_735_360 // 8
    assert rank.resident(sharded)["quantized values (own rows)"] == hidden // 16 + 2 * hidden // 1024 + 16 * 36 * 7
    uneven = replace(sharded, ranks=3)  # 4096 and 12288 rows, of which only the latter are thirds
    own = 36 * 2 * 4096 * 12288
    assert rank.resident(uneven)["quantized values (own rows)"] == own // 6 + 2 * own // 384 + 16 * 36 * 2
    assert rank.resident(uneven)["quantized values (whole)"] == packed - (own // 2 + 2 * own // 128 + 16 * 36 * 2)
    assert rank.activations(sharded) // (4 * 18432) == 36 * 4096 * 2 + 8 * 4096 + 4 + 4 * 128 + 26


def test_a_reduction_after_the_last_micro_batch_keeps_whole_gradients(eight_billion):
    """In float32, as FSDP2 accumulates what it reduces in float32; `slow/test_features.py` sees that they are kept."""
    sharded = replace(eight_billion, ranks=8, sharded=True)
    late = replace(sharded, late_reduction=True)
    extra = {name: size - rank.peaks(sharded)[name] for name, size in rank.peaks(late).items()}
    assert extra == {"rollout": 0, "sync": 0, "backward": 4 * 8_190_735_360 * 7 // 8, "optimizer step": 0}
    assert rank.peaks(replace(eight_billion, late_reduction=True)) == rank.peaks(eight_billion)  # not under DDP


def test_8b_by_hand_under_zero3(eight_billion):
    """`slow/test_zero3.py` compares these with what DeepSpeed holds."""
    parameters = tuple(replace(p, optimizer="adamw") for p in eight_billion.parameters)
    zero3 = replace(eight_billion, parameters=parameters, ranks=8, sharded=True, zero3=True)
    stays, own = rank.resident(zero3), 8_190_735_360 // 8
    assert stays["optimizer state"] == 8 * own + 4 * len(parameters)
    assert stays["master weights"] == stays["gradients (kept)"] == 2 * stays["weights to gather"] == 4 * own
    assert (
        stays["quantized values (whole)"] == rank.resident(eight_billion)["quantized values (whole)"]
        and "quantized values (own rows)" not in stays
    )
    halves = replace(zero3, parameters=tuple(replace(p, size=2) for p in parameters))
    assert rank.resident(halves) == stays  # float32 master weights of a bfloat16 model too
    assert "gradients" not in rank.moments(zero3)["backward"]
    fsdp2 = replace(zero3, zero3=False)
    assert max(rank.peaks(zero3).values()) > max(rank.peaks(fsdp2).values())


def test_sizes_of_temporaries_are_those_of_the_code():
    from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    assert (TOKEN_CHUNK_SIZE, _CHUNKED_LOGPROB_CHUNK_SIZE) == formulas.TILE
