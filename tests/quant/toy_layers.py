"""A model of one low-bit linear layer, inputs for it, its product by other means; the layers of the `tiny_model`s."""

import references
import torch
from torch import nn

from qarl_trl.quant import apply_quantization, quantize_weight, quantized_modules, store
from qarl_trl.quant.gemms import activations
from qarl_trl.quant.quantize import dequantize
from qarl_trl.quant.scheme import support_of
from quant.schemes import WEIGHT_ONLY, names_in


IN = 128  # one group of W4A16
OUT = 128  # one block of FP8_BLOCK
# Of a `tiny_model`.
LAYER = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
LINEARS = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in LAYER]


def names_of(model):
    """The names of the low-bit layers."""
    return names_in(quantized_modules(model))


def low_bit_parameters_of(model):
    """The names of the parameters that a checkpoint has in low bits."""
    return {f"{name}.weight" for name in names_of(model)}


def trained_parameters(model):
    return [param for param in model.parameters() if param.requires_grad]


def names_with_gradient(model):
    """The names of the parameters that a backward has reached."""
    return [name for name, param in model.named_parameters() if param.grad is not None]


def make_model(scheme="W4A16", bias=False, dtype=torch.float32, **options):
    """A model of one low-bit layer, `IN` to `OUT`."""
    # `nn.Linear` draws from torch's own generator, so all layers of one form are equal.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, OUT, bias=bias).to(dtype))
    return apply_quantization(model, scheme, **options)


def make_layer(*args, **options):
    """The layer of such a model, which is gone: forward and backward do not need it (tests/quant/test_store.py)."""
    return make_model(*args, **options)[0]


def make_input(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, IN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_gradient(rows, columns=OUT):
    """The gradient of an output."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))


def quantized_input(scheme, x):
    """What a layer multiplies in the place of `x`, float32."""
    if scheme in WEIGHT_ONLY:
        return x

    # Each function takes the dtype that the gemm of its scheme quantizes.
    # A token is a row of the last dimension, whatever stands before it.
    rows = x.flatten(0, -2)
    if scheme == "W4A8":
        quantized, scale = activations.quantize_tokens_int8_asymmetric(rows.bfloat16())
    elif scheme == "W8A8":
        quantized, scale = activations.quantize_tokens_int8(rows)
    elif scheme == "FP8_BLOCK":
        quantized, scale = activations.quantize_groups_fp8(rows)  # of 128 inputs: one group
    else:
        quantized, scale = activations.quantize_tokens_fp8(rows)
    return (quantized.float() * scale).view(x.shape)


def multiplied_weight(layer):
    """What a layer multiplies by, float32: the dequantized weight, but in W4AFP8 a table of float8 numbers."""
    low_bit = layer.low_bit()
    if support_of(layer.scheme).name != "W4AFP8":
        return dequantize(low_bit, torch.float32)

    # Hopper's kernel multiplies float8 numbers, which it finds in a table by the 4-bit code.
    quantized = references.unpack_int4(low_bit.quantized, layer.in_features)
    table, scale = references.int4_float8_table(quantized, low_bit.scale.tolist())
    return table * scale


def record_quantizations(monkeypatch):
    """A list that gets the shape of every weight that a store quantizes from now on."""
    shapes = []

    def recorded(weight, *args):
        shapes.append(tuple(weight.shape))
        return quantize_weight(weight, *args)

    # Not the name in `quantize`: tests call that one for what they expect.
    monkeypatch.setattr(store, "quantize_weight", recorded)
    return shapes
