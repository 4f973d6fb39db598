"""What a plan counts of a rank, against a toy trainer after an update: tensor bytes, exactly."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from slow.toys import save_model
from test_trainer import make
from transformers import AutoConfig

from qarl_trl.quant.convert import quantized_modules
from qarl_trl.quant.quantize import quantize_weight
from qarl_trl.tools.plan import items
from qarl_trl.tools.plan import model as meta
from tools.plan.runs import example_run, resident


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    kinds = {"dense": 0, "experts": 4}
    return {kind: save_model(tmp_path_factory.mktemp(kind), layers=1, experts=n) for kind, n in kinds.items()}


def counted(trainer):
    """Bytes of the master weights, of the optimizer's state and of the quantized values of a real trainer."""
    model, state = trainer.model, trainer.optimizer.optimizer.state
    tensors = [t for of_parameter in state.values() for t in of_parameter.values() if isinstance(t, torch.Tensor)]
    weights = [w for _, m in quantized_modules(model) for w in m.low_bit_cache.last().values()]
    return {
        "master weights": sum(p.nbytes for p in model.parameters()),
        "optimizer state": sum(t.nbytes for t in tensors),
        "quantized values": sum(sum(t.nbytes for t in w.tensors.values()) for w in weights),
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
    run = example_run(skeleton, config, muon, compute=4)
    found = {name: size for name, size in counted(trainer).items() if size}
    print("trainer", kind, found, "gradients", max(gradients))
    assert resident(run) == found
    assert items.trained_bytes(run) == max(gradients)
    other = meta.parameters(skeleton, "adamw_torch" if muon else "muon")
    if adapter is None:  # control
        assert resident(replace(run, parameters=other))["optimizer state"] != found["optimizer state"]


def test_moments_of_bitsandbytes(folders, tmp_path):
    """In 8 bits but for embeddings and norms, which the plan leaves out; the learner then quantizes the new weights."""
    pytest.importorskip("bitsandbytes", reason="pip install --target FOLDER --no-deps bitsandbytes; PYTHONPATH=FOLDER")
    trainer = make(folders["dense"], tmp_path, max_steps=1, export_low_bit=False, optim="adamw_8bit")
    before = [layer.low_bit().quantized.clone() for _, layer in quantized_modules(trainer.model)]
    trainer.train()
    config = meta.read_config(folders["dense"])
    skeleton = meta.skeleton(config, torch.float32, None, trainer.args.quant_plan())
    expected = example_run(skeleton, config, False, parameters=meta.parameters(skeleton, "adamw_8bit"))
    state = trainer.optimizer.optimizer.state.values()
    tensors = [t for held in state for name, t in held.items() if name[:6] in ("state1", "state2", "absmax")]
    print("bitsandbytes", sum(t.nbytes for t in tensors), items.optimizer_state(expected))
    assert sum(t.nbytes for t in tensors) == pytest.approx(items.optimizer_state(expected), rel=0.01)
    other = replace(expected, parameters=meta.parameters(skeleton, "adamw_torch"))  # control
    assert items.optimizer_state(other) > 1.5 * items.optimizer_state(expected)
    layers = [layer for _, layer in quantized_modules(trainer.model)]
    assert any(not torch.equal(old, layer.low_bit().quantized) for old, layer in zip(before, layers, strict=True))
    for layer in layers:
        assert torch.equal(layer.low_bit().quantized, quantize_weight(layer.weight, layer.scheme).quantized)


@pytest.fixture(scope="module")
def skeleton_8b():
    config = meta.read_config("Qwen/Qwen3-8B-Base")
    return meta.skeleton(config, torch.float32, plan="W4A16"), config


@pytest.fixture(scope="module")
def eight_billion(skeleton_8b):
    return example_run(*skeleton_8b)


def test_8b_by_hand(eight_billion, skeleton_8b):
    """8.19 billion float32 master weights; Muon for 6.95 billion entries in layers, AdamW for two matrices of 151936 x 4096."""
    hidden = 36 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12288)
    rest = 8_190_735_360 - hidden
    tensors = 2 + 1 + 36 * 4
    stays = resident(eight_billion)
    assert stays["master weights"] == 4 * 8_190_735_360
    assert stays["optimizer state"] == 4 * hidden + 8 * rest + 4 * tensors
    packed = hidden // 2 + 2 * hidden // 128 + 16 * 36 * 7
    assert stays["quantized values"] == packed
    assert items.synced_bytes(eight_billion) == packed + 2 * rest
    sharded = example_run(*skeleton_8b, ranks=8, fsdp2=True)
    assert resident(sharded)["master weights"] == 4 * 8_190_735_360 // 8
    assert resident(sharded)["quantized values"] == hidden // 16 + 2 * hidden // 1024 + 16 * 36 * 7
    uneven = example_run(*skeleton_8b, ranks=3, fsdp2=True)  # 4096 and 12288 rows, of which only the latter are thirds
    thirds = 36 * 2 * 4096 * 12288
    whole = packed - (thirds // 2 + 2 * thirds // 128 + 16 * 36 * 2)
    assert resident(uneven)["quantized values"] == whole + thirds // 6 + 2 * thirds // 384 + 16 * 36 * 2
    for ranks, heads in ((1, 8), (2, 4), (16, 1)):  # of keys and of values, in bfloat16
        run = replace(eight_billion, engine_ranks=ranks)
        assert items.cache_tokens(run) == items.cache_bytes(run) // (36 * 2 * heads * 128 * 2)
    assert items.activations(sharded) == 4 * 18432 * (36 * 4096 * 2 + 8 * 4096)


def test_an_engine_takes_its_share_in_the_rollout_and_without_sleep_always(eight_billion):
    share = int(0.5 * eight_billion.memory)
    names = "engine weights", "key-value cache", "work of the engine (assumed)"

    def taken(run):
        return {moment: sum(held.get(name, 0) for name in names) for moment, held in items.moments(run).items()}

    assert taken(eight_billion) == {"rollout": share, "backward": 0}
    assert set(taken(replace(eight_billion, sleep=False)).values()) == {share}
    assert set(taken(replace(eight_billion, engine="server")).values()) == {0}


def test_a_norm_of_whole_queries_counts_once():
    """OLMo2, beside the Llama of its sizes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}
    configs = [AutoConfig.for_model(kind, num_key_value_heads=4, **sizes) for kind in ("llama", "olmo2")]
    llama, olmo = (items.layer_saved(example_run(meta.skeleton(c, torch.float32), c, False)) for c in configs)
    assert olmo == llama + 2 * 64 * (4 + 4)
