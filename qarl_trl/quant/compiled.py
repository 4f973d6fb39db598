"""Run the quantizer's plain operations through `torch.compile` on a CUDA device, where that gives the same bytes.

Invariant: a compiled form is used only after it gave, in this process, on this device and for these arguments' scheme and dtypes,
the bytes of the eager one. Otherwise eager runs, and one warning says why. On a CPU eager runs always: inductor is no
faster there, and kernels of numba would save an estimated 0.1 to 0.3 s of an update of 12 s (SmolLM2-135M, from times a weight;
the step itself: `benchmarks/bench_real_step.py`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from .scheme import quantized_key


# Where the compiled form is tried.
DEVICES = ("cuda",)
# What makes a fused kernel round as the eager operations do: to bfloat16 after each of them and no fused multiply-add (the first),
# IEEE division instead of an approximate one, and no flushing of float32 denormals, which a bfloat16 denormal is.
OPTIONS = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
Function = Callable[..., Any]
_CHOSEN: dict[tuple, Function] = {}


def compiled_on_cuda(samples: Callable[..., Iterable[tuple]]) -> Callable[[Function], Function]:
    """
    Decorate a function of tensors so that it runs compiled on CUDA.

    Args:
        samples: From the first call's arguments to those of the calls that eager and compiled form are compared by, on the
            same device.
    """

    def decorate(plain: Function) -> Function:
        @functools.wraps(plain)
        def function(*args: Any) -> Any:
            if args[0].device.type not in DEVICES or type(args[0]) not in (Tensor, torch.nn.Parameter):
                return plain(*args)
            case = plain, *map(_static, args)
            if case not in _CHOSEN:
                _CHOSEN[case] = _choose(plain, samples(*args))
            return _CHOSEN[case](*args)

        return function

    return decorate


def _static(arg: Any) -> Any:
    """What a kernel is compiled for: dtypes and scheme, but no sizes."""
    if isinstance(arg, Tensor):
        return arg.device, arg.dtype
    if isinstance(arg, tuple):
        return tuple(map(_static, arg))
    if isinstance(arg, QuantizationScheme):
        return arg.format, quantized_key(arg.weights)
    return arg if isinstance(arg, torch.dtype) else None


def _choose(plain: Function, samples: Iterable[tuple]) -> Function:
    """The compiled form of a function, or the function itself after a warning."""
    compiled = torch.compile(plain, dynamic=True, options=OPTIONS)  # one kernel for the sizes of all layers
    try:
        if all(_same_bytes(compiled(*args), plain(*args)) for args in samples):
            return compiled
        problem = "gives other bytes than eager operations; please report this with the versions of torch and triton"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever compiler there is
        problem = f"does not run ({type(error).__name__}: {str(error)[:500]})"
    warnings.warn(f"torch.compile of {plain.__name__} {problem}. Eager operations run instead: slower.", stacklevel=3)
    return plain


def _same_bytes(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return all(map(_same_bytes, found, expected))
    return found.dtype == expected.dtype and torch.equal(_bytes(found), _bytes(expected))


def _bytes(tensor: Tensor) -> Tensor:
    """As uint8, with one pattern for every NaN: its sign and payload mean nothing and differ between kernels."""
    if tensor.is_floating_point():
        tensor = tensor.float()
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.contiguous().view(torch.uint8)


@functools.cache
def sample(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers `(1024, 256)` on the CPU: every bfloat16 one below 1e37, near ones and all sizes in a row, and many ties."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    patterns = torch.where(patterns.abs() < 1e37, patterns, -0.0).view(256, 256)
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(256, 256, generator=rng) * torch.logspace(-30, 4, 256).unsqueeze(-1)
    halves = torch.randint(-16, 17, (256, 256), generator=rng) / 2
    halves[:, ::16] = 7.5  # a scale of 1 where quantized values have 4 bits
    numbers = torch.cat((patterns, patterns.t(), noise, halves)).bfloat16()
    if dtype == torch.bfloat16:
        return numbers
    # Between each bfloat16 number and the next larger one, a fifth of them halfway.
    low_bits = torch.randint(0, 5, numbers.shape, generator=rng) * 2**14
    return (numbers.float().view(torch.int32) | low_bits.clamp(max=2**16 - 1).int()).view(torch.float32).to(dtype)


def diverged(numbers: Tensor) -> Tensor:
    """A copy with a NaN and infinities of either sign in some rows."""
    numbers = numbers.clone()
    for start, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        numbers[start::6].fill_diagonal_(value)
    return numbers
