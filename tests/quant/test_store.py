"""`qarl_trl.quant.store`: when low-bit weights are made and kept, and how the store learns of changes."""

import copy
import gc
import math
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from conftest import make_model as make_causal_model
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from qarl_trl.quant import apply_quantization, iter_low_bit_weights, low_bit_store, quantize_weight
from qarl_trl.quant.layers.lora import merged_weight
from qarl_trl.quant.quantize import dequantize
from qarl_trl.quant.samples import sample_weights
from quant.schemes import NVFP4, names_in, same_tensors
from quant.toy_layers import IN, OUT, make_input, make_layer, make_model, record_quantizations


TOKENS = torch.tensor([[3, 4, 5]])


def told_store(model):
    """The store of `model`, which keeps weights until it is told of a step."""
    store = low_bit_store(model)
    store.will_be_told()
    return store


def is_low_bit_form_of(low_bit, weight):
    """Whether `low_bit` was made from the master weight as it is now."""
    return same_tensors(low_bit.tensors, quantize_weight(weight, low_bit.scheme).tensors)


class Kernels(TorchDispatchMode):
    """Records the names of operations that are no views: on a GPU each is a kernel, or waits for one."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class AliasWriter(torch.optim.Optimizer):
    """Triples weights through `param.data`: like a fused or sharded optimizer it leaves no trace in the parameter."""

    def __init__(self, params):
        super().__init__(params, defaults={})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                # `param.data` is another tensor in the same memory, with a version of its own.
                param.data.mul_(3)


# Optimizer steps ----------------------------------------------------------------------------------------------------


def test_a_layer_is_quantized_once_per_optimizer_step(monkeypatch):
    quantizations = record_quantizations(monkeypatch)
    model = make_model()
    layer = model[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    low_bit_store(model).follow(optimizer)

    for step in range(1, 4):
        # Micro-batches that accumulate, and a pass for the old log-probs.
        for _ in range(3):
            layer(make_input(2)).sum().backward()
            layer.low_bit()

        assert layer.low_bit() is low_bit_store(model).kept()["0.weight"]
        assert len(quantizations) == step
        optimizer.step()


@pytest.mark.parametrize("make_optimizer", [AliasWriter, partial(torch.optim.AdamW, lr=1.0, fused=True)])
def test_a_store_that_follows_sees_what_a_parameter_does_not_show(make_optimizer):
    model = make_model()
    layer = model[0]
    optimizer = make_optimizer(model.parameters())
    store = low_bit_store(model)
    store.follow(optimizer)
    layer(make_input(2)).sum().backward()
    before = layer.low_bit()
    # All that a parameter shows of itself.
    address_and_version = (layer.weight.data_ptr(), layer.weight._version)

    optimizer.step()

    # The premise: the step left no trace. If it fails, torch counts such writes, and the store need not be told.
    assert (layer.weight.data_ptr(), layer.weight._version) == address_and_version
    assert is_low_bit_form_of(layer.low_bit(), layer.weight)
    assert not same_tensors(layer.low_bit().tensors, before.tensors)

    # Control: a write of the same kind, of which nobody tells the store.
    kept = layer.low_bit()
    layer.weight.data.mul_(-1)
    assert layer.low_bit() is kept
    store.weights_changed()
    assert is_low_bit_form_of(layer.low_bit(), layer.weight)


def test_a_store_follows_an_optimizer_that_accelerate_prepared(monkeypatch):
    """In a training loop of one's own."""
    # accelerate keeps its state for the whole process, and other tests may have set it.
    for state in (AcceleratorState, PartialState):
        monkeypatch.setattr(state, "_shared_state", {})
    model = make_model()
    layer = model[0]
    optimizer = Accelerator(cpu=True).prepare(AliasWriter(model.parameters()))
    low_bit_store(model).follow(optimizer)
    layer.low_bit()

    optimizer.step()

    assert is_low_bit_form_of(layer.low_bit(), layer.weight)


def test_a_store_that_nobody_tells_of_steps_makes_trained_weights_again(monkeypatch):
    """An optimizer may write through an alias of the parameter, which leaves no trace."""
    quantizations = record_quantizations(monkeypatch)
    layer = make_layer()
    optimizer = AliasWriter(layer.parameters())
    before = layer.low_bit()

    optimizer.step()

    assert is_low_bit_form_of(layer.low_bit(), layer.weight)
    assert not same_tensors(layer.low_bit().tensors, before.tensors)
    # One before the step, and one for each of the two questions after it.
    assert len(quantizations) == 3

    # Control: what is not trained is kept.
    layer.weight.requires_grad_(False)
    assert layer.low_bit() is layer.low_bit()


def test_a_weight_that_needs_no_gradient_is_kept_over_steps():
    model = apply_quantization(nn.Sequential(nn.Linear(IN, OUT), nn.Linear(IN, OUT)), "W4A16")
    frozen, trained = model
    frozen.requires_grad_(False)
    optimizer = AliasWriter(trained.parameters())
    low_bit_store(model).follow(optimizer)
    frozen_before = frozen.low_bit()
    trained_before = trained.low_bit()

    optimizer.step()

    assert frozen.low_bit() is frozen_before
    assert trained.low_bit() is not trained_before

    # Control: a write in place shows, also without a gradient.
    with torch.no_grad():
        frozen.weight.mul_(-1)
    assert is_low_bit_form_of(frozen.low_bit(), frozen.weight)
    assert not same_tensors(frozen.low_bit().tensors, frozen_before.tensors)


def test_an_untrained_weight_that_is_written_through_its_data_is_made_again():
    model = make_model()
    model.requires_grad_(False)
    layer = model[0]
    store = told_store(model)
    store.refresh_untrained()
    first = layer.low_bit()

    store.refresh_untrained()
    assert layer.low_bit() is first  # control: nothing changed

    layer.weight.data.mul_(3)
    store.weights_changed()
    assert layer.low_bit() is first  # control: the write leaves no trace
    store.refresh_untrained()
    assert is_low_bit_form_of(layer.low_bit(), layer.weight)


@pytest.mark.parametrize("rows", [127, 128, 191])
def test_a_head_of_attention_that_is_switched_off_through_its_data_is_seen(rows):
    """Its columns of `o_proj` alone are written; samples of whole rows' distance would all be of the first column."""
    model = nn.Sequential(nn.Linear(128, rows))
    model.requires_grad_(False)
    apply_quantization(model, "W4A16")
    layer = model[0]
    store = told_store(model)

    for columns in (slice(0, 64), slice(64, 128)):
        store.refresh_untrained()
        layer.low_bit()
        layer.weight.data[:, columns] = 0
        store.refresh_untrained()
        assert is_low_bit_form_of(layer.low_bit(), layer.weight)


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (8, 8), (1, 64), (64,)])
def test_of_a_small_weight_all_numbers_are_samples(shape):
    layer = nn.Module()
    layer.frozen_weight = None
    layer.weight = nn.Parameter(torch.arange(float(math.prod(shape))).reshape(shape))

    (sample,) = sample_weights([layer], trained=True).values()

    assert torch.equal(sample, layer.weight.detach().flatten())


@pytest.mark.parametrize("columns", [64, 576, 896, 1536, 4096])
def test_samples_are_in_many_columns_whatever_the_number_of_rows(columns):
    layer = nn.Module()
    layer.frozen_weight = None
    for rows in (63, 64, 95, 127, 128, 191, 255, 896, 1000, 4095):
        # Each number is its column.
        layer.weight = nn.Parameter(torch.arange(float(columns)).repeat(rows, 1))
        (sample,) = sample_weights([layer], trained=True).values()
        assert 20 < len(sample) <= 130
        assert len(sample.unique()) > 20


def test_untrained_weights_are_compared_all_at_once():
    """On a GPU each comparison, and each copy, would wait for the device in every step."""
    model = nn.Sequential(*[nn.Linear(IN, OUT) for _ in range(8)])
    model.requires_grad_(False)
    apply_quantization(model, "W4A16")
    model[7].weight.requires_grad_(True)
    store = told_store(model)
    store.refresh_untrained()

    with Kernels() as kernels:
        store.refresh_untrained()
    assert kernels.names == ["cat", "equal"]


def test_a_reference_model_follows_an_adapter_that_is_merged_into_its_base():
    """As ReLoRA does. The reference is made from the base alone, which nobody trains."""
    model, layer = lora_model()
    store = told_store(model)
    store.refresh_untrained()
    with model.disable_adapter():
        layer.low_bit()

    layer.base_layer.weight.data += layer.lora_B["default"].weight.data @ layer.lora_A["default"].weight.data
    store.refresh_untrained()

    with model.disable_adapter():
        assert is_low_bit_form_of(layer.low_bit(), layer.base_layer.weight)


class Attention(nn.Module):
    """Layers that an engine merges, so that NVFP4 gives them one global scale."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(64, 32)
        self.k_proj = nn.Linear(64, 16)
        self.v_proj = nn.Linear(64, 16)


def test_a_frozen_layer_follows_the_shared_global_scale_of_a_trained_one():
    """A fused optimizer writes like `AliasWriter`, and is the default of transformers."""
    model = apply_quantization(Attention(), NVFP4)
    model.q_proj.requires_grad_(False)
    # Trained are k and v. Tripled, they set the scale of q as well, whose own weight stays.
    optimizer = AliasWriter([*model.k_proj.parameters(), *model.v_proj.parameters()])
    low_bit_store(model).follow(optimizer)
    before = model.q_proj.low_bit().tensors["weight_global_scale"].clone()

    optimizer.step()

    scale = model.k_proj.low_bit().tensors["weight_global_scale"]
    assert not torch.equal(scale, before)  # control: the step changed it
    assert torch.equal(model.q_proj.low_bit().tensors["weight_global_scale"], scale)


# Other changes of a weight ------------------------------------------------------------------------------------------


def change_by_optimizer(layer, **options):
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1.0, **options)
    layer.store.follow(optimizer)
    layer(make_input(2)).sum().backward()
    optimizer.step()


def change_in_place(layer):
    with torch.no_grad():
        layer.weight.add_(torch.randn_like(layer.weight))


def change_by_loading(layer):
    # It copies in place, which raises the version.
    layer.load_state_dict({"weight": torch.randn(OUT, IN)})


def change_the_data(layer):
    layer.weight.data = torch.randn(OUT, IN)


def change_the_parameter(layer):
    layer.weight = nn.Parameter(torch.randn(OUT, IN))


def change_to_a_new_parameter_in_the_old_place(layer):
    """As when FSDP gathers the whole parameter where one was that had not been loaded; of equal version, too."""
    old = layer.weight
    layer.weight = nn.Parameter(old.data)
    with torch.no_grad():
        # A new parameter begins at version 0, and FSDP's has been written as often as the one before.
        while layer.weight._version < old._version:
            layer.weight.normal_()

    assert layer.weight._version == old._version != 0
    assert layer.weight.data_ptr() == old.data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        change_to_a_new_parameter_in_the_old_place,
        change_by_optimizer,
        partial(change_by_optimizer, fused=True),
        change_in_place,
        change_by_loading,
        change_the_data,
        change_the_parameter,
    ],
)
def test_quantized_values_follow_the_master_weight(change):
    model = make_model()
    layer = model[0]
    told_store(model)
    before = layer.low_bit()
    assert layer.low_bit() is before  # the premise: it is kept

    change(layer)

    assert is_low_bit_form_of(layer.low_bit(), layer.weight)
    assert not torch.equal(layer.low_bit().quantized, before.quantized)  # control: the change was large enough to see
    expected = F.linear(make_input(2), dequantize(layer.low_bit(), torch.float32))
    assert torch.equal(layer(make_input(2)), expected)


def test_what_is_forgotten_is_freed_and_made_again():
    model = make_model()
    layer = model[0]
    store = told_store(model)
    # Weak, because a strong reference here would keep alive what must be freed.
    quantized = weakref.ref(layer.low_bit().quantized)
    layer.weight.data.mul_(-1)
    assert is_low_bit_form_of(layer.low_bit(), -layer.weight)  # control: the write alone does not show

    store.forget()

    assert store.kept() == {}
    assert quantized() is None
    assert is_low_bit_form_of(layer.low_bit(), layer.weight)
    assert store.kept()["0.weight"] is layer.low_bit()


# Sync and file ------------------------------------------------------------------------------------------------------


def test_sync_and_file_take_the_weights_as_they_are():
    """Also after a write through `.data`, as averages of weights (EMA) are written."""
    model = make_model()
    layer = model[0]
    store = told_store(model)
    before = layer.low_bit()
    layer.weight.data.copy_(torch.randn(OUT, IN))
    assert layer.low_bit() is before  # control: the write leaves no trace

    # A sync may not trust what is kept.
    sent = dict(store.tensors())

    assert torch.equal(sent["0.weight_packed"], quantize_weight(layer.weight, layer.scheme).quantized)
    assert not torch.equal(sent["0.weight_packed"], before.quantized)
    assert layer.low_bit().quantized is sent["0.weight_packed"]  # the next forward uses what was sent


def lora_model():
    """A `PeftModel` of one low-bit layer with an adapter, and that layer."""
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(nn.Linear(IN, OUT)), LoraConfig(r=4, lora_alpha=16, target_modules=["0"]))
    layer = model.base_model.model[0]
    with torch.no_grad():
        # peft begins with zeros, which would make the merged weight the base.
        layer.lora_B["default"].weight.normal_(std=0.05)
    apply_quantization(model, "W4A16")
    return model, layer


def merged(layer):
    """The weight of a layer of `lora_model` that its forward quantizes."""
    lora_A = layer.lora_A["default"].weight
    lora_B = layer.lora_B["default"].weight
    return merged_weight(layer.base_layer.weight, lora_A, lora_B, layer.scaling["default"])


@pytest.mark.parametrize("source", ["base_layer.weight", "lora_A.default.weight", "lora_B.default.weight"])
def test_sync_and_file_take_every_source_of_a_merged_weight_as_it_is(source):
    model, layer = lora_model()
    store = told_store(model)
    before = layer.low_bit()
    parameter = layer.get_parameter(source)
    parameter.data.copy_(torch.randn_like(parameter))
    assert layer.low_bit() is before  # control: the write leaves no trace

    sent = dict(store.tensors())

    assert torch.equal(sent["0.weight_packed"], quantize_weight(merged(layer), layer.scheme).quantized)
    assert not torch.equal(sent["0.weight_packed"], before.quantized)
    assert layer.low_bit().quantized is sent["0.weight_packed"]


def test_after_a_sync_the_reference_model_has_the_base_as_it_is():
    model, layer = lora_model()
    store = told_store(model)
    # The empty name is the base without an adapter, which the reference model multiplies by.
    before = layer.low_bit("")
    layer.base_layer.weight.data.mul_(-1)

    dict(store.tensors())

    assert layer.low_bit("") is not before
    assert is_low_bit_form_of(layer.low_bit(""), layer.base_layer.weight)


# What is kept -------------------------------------------------------------------------------------------------------


def test_the_base_under_an_adapter_is_kept_beside_the_merged_weight():
    model, layer = lora_model()
    store = told_store(model)
    name = "base_model.model.0"
    assert store.kept() == {}  # control: nothing was asked for

    model(make_input(2))
    assert store.kept().keys() == {f"{name}.default"}
    with model.disable_adapter():
        model(make_input(2))
        assert store.kept().keys() == {f"{name}.default", f"{name}."}

    kept = store.kept()
    assert is_low_bit_form_of(kept[f"{name}.default"], merged(layer))
    assert is_low_bit_form_of(kept[f"{name}."], layer.base_layer.weight)
    assert not same_tensors(kept[f"{name}.default"].tensors, kept[f"{name}."].tensors)  # control

    # After a step the merged weight is another, and the base is not.
    store.weights_changed()
    model(make_input(2))
    with model.disable_adapter():
        model(make_input(2))
    assert store.kept()[f"{name}.default"] is not kept[f"{name}.default"]
    assert store.kept()[f"{name}."] is kept[f"{name}."]


def test_the_weights_of_a_deleted_layer_are_freed():
    model = apply_quantization(nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, OUT)), "W4A16")
    store = told_store(model)
    kept = [weakref.ref(layer.low_bit().quantized) for layer in model]

    del model[1]
    gc.collect()

    assert kept[1]() is None
    assert kept[0]() is not None  # control
    assert store.kept().keys() == {"0.weight"}


def test_a_layer_that_never_ran_in_low_bits_is_named():
    model = apply_quantization(make_causal_model(num_hidden_layers=1), "W4A16")
    # Before the first forward: all seven linear layers of a block.
    assert len(low_bit_store(model).bypassed_layers()) == 7
    model(TOKENS)
    assert low_bit_store(model).bypassed_layers() == []

    # Another library replaces the forward of a layer.
    model = apply_quantization(make_causal_model(num_hidden_layers=1), "W4A16")
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = lambda x: F.linear(x, layer.weight)
    model(TOKENS)
    assert low_bit_store(model).bypassed_layers() == ["model.layers.0.mlp.up_proj"]

    # The baseline has no low-bit forward to miss.
    model = apply_quantization(make_causal_model(num_hidden_layers=1), "W4A16", quantize_forward=False)
    assert low_bit_store(model).bypassed_layers() == []


# The model of a store -----------------------------------------------------------------------------------------------


def two_layer_model():
    torch.manual_seed(0)
    return apply_quantization(nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, OUT)), "W4A16")


def test_a_copied_model_has_a_store_of_its_own():
    model = two_layer_model()
    store = told_store(model)
    kept = [layer.low_bit() for layer in model]

    twin = copy.deepcopy(model)

    twin_store = low_bit_store(twin)
    assert twin_store is not store
    for layer in twin:
        assert layer.store is twin_store
    assert twin_store.model is twin
    assert twin_store.kept() == {}

    # Each has its own weights. Nobody tells the copy of steps, so it makes its trained weights again.
    with torch.no_grad():
        twin[0].weight.mul_(-1)
    assert is_low_bit_form_of(twin[0].low_bit(), twin[0].weight)
    assert twin[1].low_bit() is not twin[1].low_bit()
    for layer, low_bit in zip(model, kept, strict=True):
        assert layer.low_bit() is low_bit

    # Control: a shallow copy shares layers, store and model.
    assert low_bit_store(copy.copy(model)) is store
    assert store.model is model


def test_a_frozen_copy_that_follows_the_policy_through_its_data_is_made_again():
    """As an average of weights (EMA), which teaches. Nobody tells its store of anything."""
    model = two_layer_model()
    told_store(model)
    teacher = copy.deepcopy(model).requires_grad_(False)
    before = teacher[0].low_bit()
    assert teacher[0].low_bit() is before  # control: it is kept

    teacher[0].weight.data.mul_(0.5).add_(torch.randn_like(teacher[0].weight), alpha=0.5)

    assert is_low_bit_form_of(teacher[0].low_bit(), teacher[0].weight)


def test_a_frozen_copy_follows_the_shared_global_scale_through_the_data_of_another_layer():
    model = apply_quantization(Attention(), NVFP4)
    teacher = copy.deepcopy(model).requires_grad_(False)
    before = teacher.k_proj.low_bit().tensors["weight_global_scale"]
    assert teacher.k_proj.low_bit().tensors["weight_global_scale"] is before  # control: it is kept

    teacher.q_proj.weight.data.mul_(10)

    scale = teacher.q_proj.low_bit().tensors["weight_global_scale"]
    assert not torch.equal(scale, before)
    assert torch.equal(teacher.k_proj.low_bit().tensors["weight_global_scale"], scale)


def test_a_copy_of_a_part_belongs_to_no_model_until_it_is_attached():
    model = two_layer_model()

    part = copy.deepcopy(model[1])
    with pytest.raises(RuntimeError, match=r"no model. Call `store.attach\(model\)`"):
        part.store.model  # noqa: B018
    holder = nn.Sequential(part)

    low_bit_store(holder).attach(holder)
    assert low_bit_store(holder).model is holder
    assert low_bit_store(model).model is model  # control: the original keeps its own
    assert torch.equal(part(make_input(2)), model[1](make_input(2)))


def test_a_pickled_model_makes_its_low_bit_weights_again():
    model = two_layer_model()
    told_store(model)
    expected = model(make_input(2))

    twin = pickle.loads(pickle.dumps(model))

    store = twin[0].store
    assert twin[1].store is store
    assert store is not model[0].store
    # A pickle may hold any part of a model, so which one is the whole must be said.
    with pytest.raises(RuntimeError, match=r"no model. Call `store.attach\(model\)`"):
        store.kept()

    # The forward needs no model.
    assert torch.equal(twin(make_input(2)), expected)
    assert low_bit_store(twin) is store
    store.attach(twin)
    assert store.kept().keys() == {"0.weight", "1.weight"}
    assert same_tensors(dict(store.tensors()), dict(iter_low_bit_weights(model)))


def test_a_part_that_asks_first_does_not_keep_the_store_of_an_unpickled_model():
    model = pickle.loads(pickle.dumps(two_layer_model()))
    # Asking must attach nothing: names would count from the part then.
    low_bit_store(model[1])

    store = low_bit_store(model)
    with pytest.raises(RuntimeError, match="no model"):
        store.kept()
    store.attach(model)

    assert dict(store.tensors()).keys() == dict(iter_low_bit_weights(model)).keys()


def test_names_count_from_the_attached_model():
    model = pickle.loads(pickle.dumps(two_layer_model()))
    outer = nn.ModuleDict({"policy": model})
    store = model[0].store

    store.attach(outer)
    assert names_in(store.layers()) == ["policy.0", "policy.1"]
    assert names_in(store.tensors())[0] == "policy.0.weight_packed"
    assert low_bit_store(model) is store  # finding it again attaches nothing
    assert store.model is outer

    # Control: the model alone.
    store.attach(model)
    assert names_in(store.layers()) == ["0", "1"]


def test_a_store_does_not_keep_its_model_alive():
    model = two_layer_model()
    layer = model[0]
    store = told_store(model)
    layer.low_bit()
    reference = weakref.ref(model)
    assert store.kept().keys() == {"0.weight"}  # control: while the model lives

    # Layers know their store. If it held the model as well, a deleted model would wait for the collector.
    del model
    gc.collect()

    assert reference() is None
    with pytest.raises(RuntimeError, match=r"no model. Call `store.attach\(model\)`"):
        store.kept()

    # A layer that outlives it still follows its master weight, and can get another model.
    store.weights_changed()
    layer.weight.data.mul_(-1)
    assert is_low_bit_form_of(layer.low_bit(), layer.weight)
    store.forget()
    holder = nn.Sequential(layer)
    store.attach(holder)
    assert store.kept() == {}
    assert dict(store.tensors()).keys() == {"0.weight_packed", "0.weight_scale", "0.weight_shape", "0.bias"}


def test_a_model_without_low_bit_layers_has_no_store():
    with pytest.raises(ValueError, match=r"no quantized layer. Call apply_quantization"):
        low_bit_store(nn.Sequential(nn.Linear(IN, OUT)))


def test_a_told_store_sees_the_steps_of_any_optimizer():
    """A script goes on with the model of a trainer, which tells nothing after its run."""
    model = two_layer_model()
    layer = model[0]
    store = told_store(model)
    before = layer.low_bit()
    # Through an alias: the parameter's version stays.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    version = layer.weight._version
    model(torch.randn(2, IN)).sum().backward()
    assert layer.low_bit() is before  # control: it is kept between steps

    optimizer.step()

    assert layer.weight._version == version
    assert is_low_bit_form_of(layer.low_bit(), layer.weight)
    assert not is_low_bit_form_of(before, layer.weight)
    assert store.kept()
