"""`qarl_trl.optim.ExpertMuon`: bit for bit torch's Muon over the matrices of all experts, in one process and sharded over two."""

import pytest
import torch
from collectives import MovedBytes
from references import muon as reference_muon
from slow.isolated import isolated_group
from slow.toys import distinct_characters, prompts, save_model, settings
from test_optim import make_args, make_moe
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.optim import ExpertMuon, build_muon, split_parameters


def fused(experts, rows, columns, steps=3):
    """A parameter `(experts, rows, columns)` and its gradients; an expert has no tokens in the first step."""
    generator = torch.Generator().manual_seed(5)
    start, *grads = torch.randn(1 + steps, experts, rows, columns, generator=generator)
    grads[0][-1] = 0
    return start, grads


# Arguments of torch's Muon.
MUON = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


def expert_muon(start, projections, **changes):
    """The parameter and its optimizer; `changes` are arguments of torch's Muon."""
    param = nn.Parameter(start.clone())
    defaults = torch.optim.Muon([{"params": []}], **MUON | changes).defaults
    return param, ExpertMuon([{"params": [param], "projections": projections}], defaults)


def take_steps(param, optimizer, grads):
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def matrices(tensor, projections):
    experts, rows, columns = tensor.shape
    return tensor.reshape(experts * projections, rows // projections, columns)


def one_by_one(start, grads, projections, **changes):
    """torch's Muon over the matrices, each a parameter of its own; put together again."""
    stepped = []
    for matrix, *own in zip(*(matrices(tensor, projections) for tensor in (start, *grads)), strict=True):
        param = nn.Parameter(matrix.clone())
        stepped.append(take_steps(param, torch.optim.Muon([param], **MUON | changes), own))
    return torch.stack(stepped).reshape(start.shape)


# The step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "projections"), [((3, 64, 24), 2), ((4, 33, 17), 1), ((1, 16, 40), 1)])
def test_experts_step_as_torch_muon_steps_each_matrix(shape, projections, dtype):
    start, grads = fused(*shape)
    start, grads = start.to(dtype), [grad.to(dtype) for grad in grads]
    result = take_steps(*expert_muon(start, projections), grads)
    assert torch.equal(result, one_by_one(start, grads, projections))
    # control: gate and up as one matrix, or two experts as one
    assert not torch.equal(result, one_by_one(start, grads, 3 - projections if shape[1] % 2 == 0 else 3))


def test_experts_agree_with_the_float64_reference():
    start, grads = fused(3, 64, 24)
    grads[0][-1] = grads[1][-1]  # the reference divides by the norm
    result = take_steps(*expert_muon(start, 2), grads)

    def error(projections):
        parts = zip(*(matrices(tensor, projections) for tensor in (start, *grads)), strict=True)
        reference = torch.stack([reference_muon(weight, own, **MUON) for weight, *own in parts]).reshape(start.shape)
        return (result - reference).norm() / (reference - start).norm()

    assert error(2) < 0.03  # bfloat16, as for the matrices of test_optim.py
    assert error(1) > 0.1  # control: gate and up as one matrix


def test_a_transposed_parameter_steps_alike():
    """transformers transposes the experts of some checkpoints as it loads them."""
    start, grads = fused(3, 64, 24)
    param, optimizer = expert_muon(start, 2)
    param.data = start.mT.contiguous().mT
    assert torch.equal(take_steps(param, optimizer, grads), take_steps(*expert_muon(start, 2), grads))


# In training --------------------------------------------------------------------------------------------------------


def test_the_trainer_moves_every_matrix_by_muon(tmp_path):
    model = save_model(tmp_path / "model", layers=1, experts=4)
    changes = {"use_vllm": False, "max_completion_length": 8, "per_device_train_batch_size": 4, "bf16": False}
    changes |= {"max_steps": 2, "lr_scheduler_type": "constant"}

    def moved(**optimizer):
        """Root mean square per matrix of what two steps changed."""
        args = QaRLConfig(**settings(tmp_path / "run", **changes), **optimizer)
        trainer = QaRLTrainer(model, distinct_characters, args, train_dataset=prompts())
        experts = trainer.model.model.layers[0].mlp.experts
        before = [matrices(p.detach().clone(), count) for p, count in zip(experts.parameters(), (2, 1), strict=True)]
        trainer.train()
        after = [matrices(p.detach(), count) for p, count in zip(experts.parameters(), (2, 1), strict=True)]
        return torch.cat([(new - old).square().mean((1, 2)).sqrt() for old, new in zip(before, after, strict=True)])

    # 0.2 of the rate a step, times singular values of at most 1.2; fewer than all are left of so few tokens.
    most = 2 * 0.2 * 1e-3 * 1.2
    by_muon = moved(optim_muon=True)
    assert len(by_muon) == 4 * 3
    assert (by_muon > most / 10).all() and (by_muon < most).all()
    assert (moved(optim_muon=False) > most).all()  # control: AdamW


# Queries of more rows than columns.
TALL = {"head_dim": 24}
# As accelerate saves and loads an optimizer under the recipes' `fsdp2.yaml`.
FULL_STATE_DICT = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)


def given_gradients(model):
    """Four steps: for all parameters, and in the last one for those of experts alone."""
    generator = torch.Generator().manual_seed(7)
    names = [name for name, _ in model.named_parameters()]
    steps = [
        {name: torch.randn(model.get_parameter(name).shape, generator=generator) for name in names} for _ in range(4)
    ]
    return [*steps[:3], {name: grad for name, grad in steps[3].items() if "experts" in name}]


def sharded_steps(folder, experts):
    """Under FSDP2, the last two steps from a checkpoint; rank 0 writes the master weights. Bytes gathered and summed in each step, experts here."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = make_moe(experts, **TALL)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer, collectives = build_muon(model, make_args()), []
    for step, grads in enumerate(given_gradients(model)):
        model.zero_grad()
        if step == 2:
            state = get_optimizer_state_dict(model, optimizer, options=FULL_STATE_DICT)
            optimizer = build_muon(model, make_args())
            set_optimizer_state_dict(model, optimizer, state, options=FULL_STATE_DICT)
        for name, grad in grads.items():
            model.get_parameter(name).grad = distribute_tensor(grad, mesh, [Shard(0)])
        with MovedBytes() as moved:
            optimizer.step()
        collectives.append((moved.gathered, moved.summed))
    master_weights = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    if torch.distributed.get_rank() == 0:
        torch.save(master_weights, f"{folder}/master_weights.pt")
    own = len(model.model.layers[0].mlp.experts.down_proj.to_local())

    cut, optimizer = expert_muon(torch.ones(2, 8, 8), 2)
    cut = optimizer.param_groups[0]["params"][0] = nn.Parameter(distribute_tensor(cut.data, mesh, [Shard(1)]))
    cut.grad = cut.detach().clone()
    with pytest.raises(RuntimeError, match=r"whole experts: \(2, 8, 8\).*Shard\(dim=1\).*FSDP2"):
        optimizer.step()
    torch.distributed.destroy_process_group()
    return own, collectives


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "shards"), [(4, [2, 2]), (3, [2, 1]), (1, [1, 0])])
def test_sharded_experts_step_as_in_one_process_and_communicate_nothing(tmp_path, experts, shards):
    (first, collectives), (second, _) = isolated_group(sharded_steps, 2, str(tmp_path), experts)
    assert [first, second] == shards
    assert collectives[3] == (0, 0)
    alone = make_moe(experts, **TALL)
    attention = [alone.get_parameter(name).shape for name in split_parameters(alone)[0]]
    # Five iterations in bfloat16, as build_muon says. Of what is gathered, half is here already.
    gathered = sum(10 * (2 * rows * columns + rows * rows) for rows, columns in attention if rows <= columns)
    summed = sum(20 * columns * columns for rows, columns in attention if rows > columns)
    assert collectives[0][0] == gathered / 2 > 0
    assert collectives[0][1] == summed + 2 * len(attention)  # and the norm of each

    optimizer = build_muon(alone, make_args())
    for step, grads in enumerate(given_gradients(alone)):
        alone.zero_grad()
        for name, grad in grads.items():
            alone.get_parameter(name).grad = grad
        if step == 3:
            before = {name: param.detach().clone() for name, param in alone.named_parameters()}
        optimizer.step()
    sharded = torch.load(tmp_path / "master_weights.pt")
    names = [name for name in sharded if "experts" in name]
    assert len(names) == 4
    for name in names:
        assert torch.equal(sharded[name], alone.get_parameter(name))
        assert not torch.equal(sharded[name], before[name])  # control: the last step moved it
    start = dict(make_moe(experts, **TALL).named_parameters())
    for name in split_parameters(alone)[0]:
        # torch's Muon sees whole matrices. Measured 0.017: bfloat16 sums in another order; 0.35 for each shard by itself.
        travelled = (alone.get_parameter(name) - start[name]).norm()
        assert (sharded[name] - alone.get_parameter(name)).norm() < 0.05 * travelled
