"""`qarl_trl.optim.ExpertMuon`: bit for bit torch's Muon over the matrices of all experts (CPU), whole and sharded."""

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
from torch.utils._python_dispatch import TorchDispatchMode

from qarl_trl import QaRLConfig, QaRLTrainer, optim
from qarl_trl.optim import ExpertMuon, build_muon, split_parameters


# Arguments of torch's Muon.
MUON = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


def random_experts(experts, rows, columns, steps=3):
    """A parameter `(experts, rows, columns)` and its gradients; an expert has no tokens in the first step."""
    generator = torch.Generator().manual_seed(5)
    start, *grads = torch.randn(1 + steps, experts, rows, columns, generator=generator)
    # Muon divides by the norm, which is 0 here.
    grads[0][-1] = 0
    return start, grads


def expert_muon(start, projections):
    """The parameter and its optimizer."""
    param = nn.Parameter(start.clone())
    defaults = torch.optim.Muon([{"params": []}], **MUON).defaults
    return param, ExpertMuon([{"params": [param], "projections": projections}], defaults)


def take_steps(param, optimizer, grads):
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def matrices(tensor, projections):
    """The matrices of all experts, `(experts * projections, rows, columns)`."""
    experts, rows, columns = tensor.shape
    return tensor.reshape(experts * projections, rows // projections, columns)


def each_matrix(start, grads, projections):
    """Of each matrix its start and its gradients."""
    starts = matrices(start, projections)
    # `(matrices, steps, rows, columns)`.
    own_grads = torch.stack([matrices(grad, projections) for grad in grads], dim=1)
    return list(zip(starts, own_grads, strict=True))


def one_by_one(start, grads, projections):
    """torch's Muon over the matrices, each a parameter of its own; put together again."""
    stepped = []
    for matrix, own_grads in each_matrix(start, grads, projections):
        param = nn.Parameter(matrix.clone())
        stepped.append(take_steps(param, torch.optim.Muon([param], **MUON), own_grads))
    return torch.stack(stepped).reshape(start.shape)


# The step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "projections", "mistaken"),
    [
        ((3, 64, 24), 2, 1),  # gate and up as one matrix
        ((4, 33, 17), 1, 3),  # an expert as three
        ((1, 16, 40), 1, 2),  # an expert as two
    ],
)
def test_experts_step_as_torch_muon_steps_each_matrix(shape, projections, mistaken, dtype):
    start, grads = random_experts(*shape)
    start = start.to(dtype)
    grads = [grad.to(dtype) for grad in grads]

    result = take_steps(*expert_muon(start, projections), grads)

    def error(projections):
        expected = one_by_one(start, grads, projections)
        return ((result - expected).float().norm() / (expected - start).float().norm()).item()

    # In bfloat16 torch's CPU kernel rounds the last, scalar entries of a tensor otherwise (`Tensor.add` with `alpha`).
    # Seen 0.083 of the movement, which is of the size of a rounding step.
    assert error(projections) <= (0 if dtype == torch.float32 else 0.15)
    # Control: the mistaken matrices step in another way.
    assert error(mistaken) > error(projections) + 0.1


class CountMatmuls(TorchDispatchMode):
    """Counts products of matrices and of batches of them."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.number += 1
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
            self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("entries", "batches"), [(2**26, 1), (2 * 64 * 24, 3), (1, 6)])
def test_matrices_step_in_batches_of_bounded_size(monkeypatch, entries, batches):
    monkeypatch.setattr(optim, "ENTRIES_AT_ONCE", entries)
    start, grads = random_experts(6, 64, 24)
    param, optimizer = expert_muon(start, 2)

    with CountMatmuls() as matmuls:
        result = take_steps(param, optimizer, grads)

    # Three steps of five iterations of three products.
    assert matmuls.number == 3 * 5 * 3 * batches
    assert torch.equal(result, one_by_one(start, grads, 2))


def test_experts_agree_with_the_float64_reference():
    start, grads = random_experts(3, 64, 24)
    # The reference divides by the norm.
    grads[0][-1] = grads[1][-1]

    result = take_steps(*expert_muon(start, 2), grads)

    def error(projections):
        stepped = []
        for matrix, own_grads in each_matrix(start, grads, projections):
            stepped.append(reference_muon(matrix, own_grads, **MUON))
        reference = torch.stack(stepped).reshape(start.shape)
        return (result - reference).norm() / (reference - start).norm()

    # Newton-Schulz iterations run in bfloat16, the reference in float64.
    assert error(2) < 0.03
    # Control: gate and up as one matrix.
    assert error(1) > 0.1


def test_a_transposed_parameter_steps_alike():
    """transformers transposes the experts of some checkpoints as it loads them."""
    start, grads = random_experts(3, 64, 24)
    param, optimizer = expert_muon(start, 2)
    param.data = start.mT.contiguous().mT

    transposed = take_steps(param, optimizer, grads)

    assert torch.equal(transposed, take_steps(*expert_muon(start, 2), grads))


# In training --------------------------------------------------------------------------------------------------------


def test_the_trainer_moves_every_matrix_by_muon(tmp_path):
    model = save_model(tmp_path / "model", layers=1, experts=4)
    changes = {
        "use_vllm": False,
        "max_completion_length": 8,
        "per_device_train_batch_size": 4,
        "bf16": False,
        "max_steps": 2,
        "lr_scheduler_type": "constant",
    }

    def expert_matrices(trainer):
        """All matrices of the experts' two parameters."""
        gate_up, down = trainer.model.model.layers[0].mlp.experts.parameters()
        return [matrices(gate_up.detach().clone(), 2), matrices(down.detach().clone(), 1)]

    def moved(**optimizer):
        """Root mean square per matrix of what two steps changed."""
        args = QaRLConfig(**settings(tmp_path / "run", **changes), **optimizer)
        trainer = QaRLTrainer(model, distinct_characters, args, train_dataset=prompts())

        before = expert_matrices(trainer)
        trainer.train()
        after = expert_matrices(trainer)

        sizes = []
        for old, new in zip(before, after, strict=True):
            sizes.append((new - old).square().mean((1, 2)).sqrt())
        return torch.cat(sizes)

    # 0.2 of the rate a step, times singular values of at most 1.2; fewer than all are left of so few tokens.
    most = 2 * 0.2 * 1e-3 * 1.2
    by_muon = moved(optim_muon=True)
    assert len(by_muon) == 4 * 3
    assert (by_muon > most / 10).all()
    assert (by_muon < most).all()
    # Control: AdamW, whose first steps move every entry by about the rate.
    assert (moved(optim_muon=False) > most).all()


# Sharded ------------------------------------------------------------------------------------------------------------


# Queries of more rows than columns.
TALL = {"head_dim": 24}
# As accelerate saves and loads an optimizer under the recipes' `fsdp2.yaml`.
FULL_STATE_DICT = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)


def gradients_of_four_steps(model):
    """For all parameters, and in the last step for those of experts alone."""
    generator = torch.Generator().manual_seed(7)
    steps = []
    for _ in range(4):
        grads = {}
        for name, param in model.named_parameters():
            grads[name] = torch.randn(param.shape, generator=generator)
        steps.append(grads)

    # A step without attention must communicate nothing at all.
    for name in list(steps[3]):
        if "experts" not in name:
            del steps[3][name]
    return steps


def sharded_steps(folder, experts):
    """
    Four steps under FSDP2, the last two from a checkpoint; rank 0 writes the master weights.

    Returns: the number of experts here, and the bytes gathered and summed in each step.
    """
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = make_moe(experts, **TALL)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = build_muon(model, make_args())

    # Gradients are set, not computed: a backward would communicate too.
    moved_bytes = []
    for step, grads in enumerate(gradients_of_four_steps(model)):
        model.zero_grad()
        if step == 2:
            optimizer = rebuilt_from_checkpoint(model, optimizer)
        for name, grad in grads.items():
            model.get_parameter(name).grad = distribute_tensor(grad, mesh, [Shard(0)])
        with MovedBytes() as moved:
            optimizer.step()
        moved_bytes.append((moved.gathered, moved.summed))

    master_weights = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    if torch.distributed.get_rank() == 0:
        torch.save(master_weights, f"{folder}/master_weights.pt")
    experts_here = len(model.model.layers[0].mlp.experts.down_proj.to_local())

    assert_cut_matrices_are_refused(mesh)
    torch.distributed.destroy_process_group()
    return experts_here, moved_bytes


def rebuilt_from_checkpoint(model, optimizer):
    """A new optimizer with the state of another one, as accelerate saves and loads it."""
    state = get_optimizer_state_dict(model, optimizer, options=FULL_STATE_DICT)
    rebuilt = build_muon(model, make_args())
    set_optimizer_state_dict(model, rebuilt, state, options=FULL_STATE_DICT)
    return rebuilt


def assert_cut_matrices_are_refused(mesh):
    """A parameter that is sharded within its matrices."""
    param, optimizer = expert_muon(torch.ones(2, 8, 8), 2)
    cut = nn.Parameter(distribute_tensor(param.data, mesh, [Shard(1)]))
    cut.grad = cut.detach().clone()
    optimizer.param_groups[0]["params"][0] = cut

    with pytest.raises(RuntimeError, match=r"whole experts: \(2, 8, 8\).*Shard\(dim=1\).*FSDP2"):
        optimizer.step()


def expected_bytes(shapes):
    """What Muon's five iterations in bfloat16 gather and sum for matrices of these shapes, as `build_muon` says."""
    gathered = 0
    # The norm of each matrix, a bfloat16 number.
    summed = 2 * len(shapes)
    for rows, columns in shapes:
        # The smaller square product: of wide matrices it needs all rows, of tall ones it is a sum over shards.
        if rows <= columns:
            gathered += 10 * (2 * rows * columns + rows * rows)
        else:
            summed += 20 * columns * columns

    # Of what is gathered, half is here already.
    return gathered / 2, summed


# The same number on both ranks, one more on the first, and a rank without any.
@pytest.mark.slow
@pytest.mark.parametrize(("experts", "shards"), [(4, [2, 2]), (3, [2, 1]), (1, [1, 0])])
def test_sharded_experts_step_as_in_one_process_and_communicate_nothing(tmp_path, experts, shards):
    results = isolated_group(sharded_steps, 2, str(tmp_path), experts)
    sharded = torch.load(tmp_path / "master_weights.pt")

    (first, moved_bytes), (second, _) = results
    assert [first, second] == shards
    assert moved_bytes[3] == (0, 0)

    alone = make_moe(experts, **TALL)
    attention = split_parameters(alone).matrices
    gathered, summed = expected_bytes([alone.get_parameter(name).shape for name in attention])
    # Control: a step of attention communicates, and just this. The experts add nothing.
    assert moved_bytes[0][0] == gathered > 0
    assert moved_bytes[0][1] == summed

    optimizer = build_muon(alone, make_args())
    for grads in gradients_of_four_steps(alone):
        alone.zero_grad()
        for name, grad in grads.items():
            alone.get_parameter(name).grad = grad
        before_last = {name: param.detach().clone() for name, param in alone.named_parameters()}
        optimizer.step()

    experts_of_all_layers = split_parameters(alone).experts
    assert len(experts_of_all_layers) == 4
    for name in experts_of_all_layers:
        assert torch.equal(sharded[name], alone.get_parameter(name))
        # Control: the last step moved it.
        assert not torch.equal(sharded[name], before_last[name])

    start = dict(make_moe(experts, **TALL).named_parameters())
    for name in attention:
        # torch's Muon sees whole matrices. Measured 0.017: bfloat16 sums in another order. 0.35 for each shard by
        # itself.
        travelled = (alone.get_parameter(name) - start[name]).norm()
        assert (sharded[name] - alone.get_parameter(name)).norm() < 0.05 * travelled
