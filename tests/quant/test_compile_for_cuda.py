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
BF16, ASYM = torch.bfloat16, resolve_scheme("W4A16_ASYM")


@pytest.fixture(autouse=True)
def dynamo(monkeypatch):
    """`isolated` switches it off for good."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")


@contextlib.contextmanager
def pretended_gpu(capability):
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.runtime import driver

    numbers = {"multi_processor_count": 132, "max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536}
    major, minor = divmod(capability, 10)
    props = types.SimpleNamespace(major=major, minor=minor, warp_size=32, max_threads_per_block=1024, **numbers)
    target = triton.GPUTarget("cuda", capability, 32)
    current = types.SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    interface = "torch._dynamo.device_interface.CudaInterface"
    with contextlib.ExitStack() as stack:
        for name, value in {
            "torch.cuda.is_available": lambda: True,
            "torch.cuda.current_device": lambda: 0,
            "torch.cuda.device_count": lambda: 1,
            "torch.cuda.get_device_capability": lambda device=None: (major, minor),
            "torch.cuda._lazy_init": lambda: None,
            f"{interface}.get_compute_capability": staticmethod(lambda device=None: capability),
            f"{interface}.raise_if_triton_unavailable": staticmethod(lambda device=None: None),
            f"{interface}.Worker.get_device_properties": staticmethod(lambda device=None: props),
        }.items():
            stack.enter_context(patch(name, value))
        stack.enter_context(patch("torch.cuda._get_device_properties", lambda device=None: props, create=True))
        stack.enter_context(patch.object(driver, "_active", current))
        for answered in (DeviceProperties.create.__func__, torch.utils._triton.has_triton):  # once for a process
            answered.cache_clear()
            stack.callback(answered.cache_clear)
        yield target


def source(function, *inputs):
    """Inductor's code for inputs of these shapes and dtypes, with the package's options."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with inductor.patch({**compiled.OPTIONS, "compile_threads": 1}):
        with mode:
            fakes = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in inputs]
            traced = make_fx(torch.func.functionalize(function), select_decomp_table())(*fakes)  # no `clamp_` is left
            graph = GraphLowering(traced, shape_env=mode.shape_env)
        handlers = V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(DebugContext())
        with handlers[0], handlers[1], handlers[2], torch.no_grad():
            graph.run(*fakes)
            return graph.codegen()[0].value


def assembled(code, target, folder):
    """The PTX of its kernels, after the assembler took them."""
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.compiler import ASTSource, compile

    texts = []
    for name, body in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S):
        meta = eval(re.search(r"triton_meta=(\{.*?\}),\n", body, re.S)[1], {"DeviceProperties": DeviceProperties})
        file = folder / f"{name}.py"  # Triton reads the source of a function from its file
        start, jit = body.index("@triton_heuristics"), body.index("@triton.jit")
        file.write_text(body[:start].replace("triton_helpers.set_driver_to_gpu()", "") + body[jit:])
        spec = importlib.util.spec_from_file_location(name, file)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        sizes = {key: 64 for key, kind in meta["signature"].items() if kind == "constexpr"}
        options = {"enable_fp_fusion": meta["enable_fp_fusion"], "enable_reflect_ftz": not meta["disable_ftz"]}
        kernel = compile(ASTSource(getattr(module, name), meta["signature"], sizes), target=target, options=options)
        assert kernel.asm["cubin"]
        texts.append(kernel.asm["ptx"])
    return "\n".join(texts)


def encoded(rows):
    def encode(weight, scale, zero_point):
        return reference.encode.__wrapped__(weight, (scale, zero_point), ASYM)

    return source(encode, ((rows, 2048), BF16), ((rows, 16), BF16), ((rows, 16), torch.int8))


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_divisions_are_exact_and_nothing_is_fused_or_flushed(capability, tmp_path):
    with pretended_gpu(capability) as target:
        texts = [assembled(encoded(1024), target, tmp_path)]
        for function in [activations.quantize_tokens_int8] + [activations.quantize_tokens_fp8] * (capability >= 89):
            texts.append(assembled(source(function.__wrapped__, ((64, 2048), BF16)), target, tmp_path))
        with patch.object(compiled, "OPTIONS", {}):
            other = assembled(encoded(1024), target, tmp_path)
    for text in texts:
        assert "div.rn.f32" in text
        assert not re.search(r"fma\.\S*f32|div\.(full|approx)|\.ftz", text)
    assert "div.full.f32" in other  # control: what inductor does by itself


def test_offsets_beyond_two_billion_numbers_have_64_bits():
    with pretended_gpu(90):
        large, small = encoded(2**21), encoded(1024)
    assert "'xnumel': 'i64'" in large and "'xnumel': 'i32'" not in large
    assert "tl.program_id(0).to(tl.int64)" in large
    assert "'xnumel': 'i32'" in small and "int64" not in small  # control
