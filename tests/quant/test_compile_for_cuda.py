"""What inductor and Triton make of the quantizer for a GPU that is not there: assembled, and read; not run.

Inductor is told of a device by the few functions that it asks; everything else is its own.
"""

import contextlib
import importlib.util
import re
import types
from unittest.mock import patch

import pytest
import torch
import torch.utils._triton
from torch._inductor import config as inductor

from qarl_trl.quant import activations, compiled, reference, resolve_scheme


triton = pytest.importorskip("triton.backends.compiler")
pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
ASYM = resolve_scheme("W4A16_ASYM")


@pytest.fixture(autouse=True)
def dynamo(monkeypatch):
    """`isolated` switches it off for good."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")


def properties_of(capability):
    """What CUDA says of a GPU."""
    major, minor = divmod(capability, 10)
    return types.SimpleNamespace(
        major=major,
        minor=minor,
        warp_size=32,
        max_threads_per_block=1024,
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
    )


def answers_of(capability):
    """What inductor asks of a device, by the full name of the function that answers."""
    properties = properties_of(capability)
    interface = "torch._dynamo.device_interface.CudaInterface"
    return {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.get_device_capability": lambda device=None: (properties.major, properties.minor),
        "torch.cuda._lazy_init": lambda: None,
        f"{interface}.get_compute_capability": staticmethod(lambda device=None: capability),
        f"{interface}.raise_if_triton_unavailable": staticmethod(lambda device=None: None),
        f"{interface}.Worker.get_device_properties": staticmethod(lambda device=None: properties),
    }


@contextlib.contextmanager
def pretended_gpu(capability):
    """Inductor and Triton see a GPU; yields Triton's target."""
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.runtime import driver

    properties = properties_of(capability)
    target = triton.GPUTarget("cuda", capability, 32)
    active_driver = types.SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    # These answer once for a process.
    remembered = (DeviceProperties.create.__func__, torch.utils._triton.has_triton)

    with contextlib.ExitStack() as stack:
        for name, answer in answers_of(capability).items():
            stack.enter_context(patch(name, answer))
        # A build of torch without CUDA lacks this one.
        stack.enter_context(patch("torch.cuda._get_device_properties", lambda device=None: properties, create=True))
        stack.enter_context(patch.object(driver, "_active", active_driver))
        for function in remembered:
            function.cache_clear()
            stack.callback(function.cache_clear)
        yield target


def inductor_source(function, *inputs):
    """Inductor's code for inputs of these shapes and dtypes, with the package's options."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with inductor.patch({**compiled.OPTIONS, "compile_threads": 1}):
        with fake_mode:
            fakes = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in inputs]
            # No `clamp_` is left.
            functional = torch.func.functionalize(function)
            traced = make_fx(functional, select_decomp_table())(*fakes)
            graph = GraphLowering(traced, shape_env=fake_mode.shape_env)

        with (
            V.set_graph_handler(graph),
            V.set_fake_mode(fake_mode),
            V.set_debug_handler(DebugContext()),
            torch.no_grad(),
        ):
            graph.run(*fakes)
            code, *_ = graph.codegen()
            return code.value


def kernels_of(code):
    """Name and source of the Triton kernels in inductor's code."""
    return re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S)


def assembled(code, target, folder):
    """The PTX of its kernels, after the assembler took them."""
    from triton.compiler import ASTSource, compile

    texts = []
    for name, body in kernels_of(code):
        meta = triton_meta(body)
        signature = meta["signature"]
        sizes = {argument: 64 for argument, kind in signature.items() if kind == "constexpr"}
        options = {"enable_fp_fusion": meta["enable_fp_fusion"], "enable_reflect_ftz": not meta["disable_ftz"]}

        function = jit_function(name, body, folder)
        kernel = compile(ASTSource(function, signature, sizes), target=target, options=options)
        assert kernel.asm["cubin"]
        texts.append(kernel.asm["ptx"])
    return "\n".join(texts)


def triton_meta(body):
    """What inductor says of a kernel to its decorator."""
    from torch._inductor.runtime.hints import DeviceProperties

    text = re.search(r"triton_meta=(\{.*?\}),\n", body, re.S)[1]
    return eval(text, {"DeviceProperties": DeviceProperties})


def jit_function(name, body, folder):
    """Triton's function of a kernel, without inductor's decorator."""
    # Triton reads the source of a function from its file.
    head = body[: body.index("@triton_heuristics")].replace("triton_helpers.set_driver_to_gpu()", "")
    file = folder / f"{name}.py"
    file.write_text(head + body[body.index("@triton.jit") :])

    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def source_of_encode(rows):
    """Inductor's code that encodes a weight of 2048 columns."""

    def encode(weight, scale, zero_point):
        return reference.encode.__wrapped__(weight, scale, zero_point, ASYM)

    return inductor_source(encode, ((rows, 2048), BF16), ((rows, 16), BF16), ((rows, 16), torch.int8))


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_divisions_are_exact_and_nothing_is_fused_or_flushed(capability, tmp_path):
    quantizers = [activations.quantize_tokens_int8]
    if capability >= 89:
        quantizers.append(activations.quantize_tokens_fp8)

    with pretended_gpu(capability) as target:
        texts = [assembled(source_of_encode(1024), target, tmp_path)]
        for quantize in quantizers:
            code = inductor_source(quantize.__wrapped__, ((64, 2048), BF16))
            texts.append(assembled(code, target, tmp_path))
        with patch.object(compiled, "OPTIONS", {}):
            by_default = assembled(source_of_encode(1024), target, tmp_path)

    for text in texts:
        assert "div.rn.f32" in text
        assert not re.search(r"fma\.\S*f32|div\.(full|approx)|\.ftz", text)
    # Control: what inductor does by itself.
    assert "div.full.f32" in by_default


def test_offsets_beyond_two_billion_numbers_have_64_bits():
    with pretended_gpu(90):
        large = source_of_encode(2**21)
        small = source_of_encode(1024)

    assert "'xnumel': 'i64'" in large
    assert "'xnumel': 'i32'" not in large
    assert "tl.program_id(0).to(tl.int64)" in large
    # Control.
    assert "'xnumel': 'i32'" in small
    assert "int64" not in small
