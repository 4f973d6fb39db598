"""`qarl_trl.quant.convert`: the layers change and nothing else does, and everything changes back."""

import copy
import pickle

import pytest
import torch

from qarl_trl.learner.attention import attend_from_cache
from qarl_trl.quant import apply_quantization, quantized_modules, remove_quantization
from qarl_trl.quant.layers.linear import QuantLinear
from quant.schemes import names_in
from quant.toy_layers import LINEARS, names_of


TOKENS = torch.tensor([[3, 4, 5, 6, 7]])


def structure_of(model):
    """All that must stay as it is, besides values: modules, parameters, buffers, `state_dict`."""
    parameters = {}
    for name, param in model.named_parameters():
        # `id`: an optimizer that was made before holds these very objects.
        parameters[name] = (tuple(param.shape), param.dtype, param.requires_grad, id(param))

    return {
        "parameters": list(parameters.items()),
        "modules": names_in(model.named_modules()),
        "buffers": names_in(model.named_buffers()),
        "state_dict": list(model.state_dict()),
    }


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_names_parameters_and_state_dict_stay_as_they_were(tiny_model, kind, scheme):
    model = tiny_model(kind)
    structure = structure_of(model)
    # Copies, because `state_dict` gives the parameters themselves.
    values = copy.deepcopy(model.state_dict())
    logits = model(TOKENS).logits

    assert apply_quantization(model, scheme) is model

    assert names_of(model) == LINEARS
    assert structure_of(model) == structure
    # Control: the forward did change.
    assert not torch.equal(model(TOKENS).logits, logits)

    # A forward and a backward leave nothing behind, either, and reach every parameter.
    model(TOKENS, labels=TOKENS).loss.backward()
    assert structure_of(model) == structure
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values[name]), name
    for name, param in model.named_parameters():
        assert param.grad is not None, name
    assert not hasattr(model.config, "quantization_config")


# And back -----------------------------------------------------------------------------------------------------------


def test_removing_restores_the_model(tiny_model):
    model = apply_quantization(tiny_model(), "W4A16")
    attend_from_cache(model, "fp8")
    # From the same seed, so it is the model as it was before.
    plain = tiny_model()
    quantized_logits = model(TOKENS).logits

    assert remove_quantization(model) is model

    assert names_of(model) == []
    for (name, module), (_, original) in zip(model.named_modules(), plain.named_modules(), strict=True):
        assert type(module) is type(original), name
        # No attribute of a low-bit layer is left.
        assert module.__dict__.keys() == original.__dict__.keys(), name
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    # Control: it was another model in between.
    assert not torch.equal(quantized_logits, plain(TOKENS).logits)


def pickle_and_load(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("clone", [copy.deepcopy, pickle_and_load])
def test_a_copy_of_a_quantized_model_is_quantized_and_independent(tiny_model, clone):
    model = apply_quantization(tiny_model(), "W4A16")
    logits = model(TOKENS).logits

    twin = clone(model)

    assert names_of(twin) == LINEARS
    for _, layer in quantized_modules(twin):
        assert isinstance(layer, QuantLinear)
        # The product is chosen again at the first forward.
        assert layer.gemm is None
    assert torch.equal(twin(TOKENS).logits, logits)

    with torch.no_grad():
        # What is written to the twin must reach the twin alone.
        for param in twin.parameters():
            param.mul_(2)
    assert torch.equal(model(TOKENS).logits, logits)
    assert not torch.equal(twin(TOKENS).logits, logits)
