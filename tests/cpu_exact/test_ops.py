"""`qarl_trl.cpu_exact.ops`: the learner's operations against vLLM's, against float64, and against transformers'."""

import copy

import pytest
import torch
import torch.nn.functional as F
from quant.schemes import normal, relative_error, same_bytes
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qarl_trl.cpu_exact import kernels, ops
from qarl_trl.cpu_exact.ops import (
    EngineRMSNorm,
    engine_attention,
    has_engine_ops,
    leave_engine_ops,
    unsupported,
    use_engine_ops,
)
from qarl_trl.quant import apply_quantization, remove_quantization
from qarl_trl.quant.kv_cache import round_to_cache


pytestmark = pytest.mark.usefixtures("several_threads")
SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = [
    (LlamaConfig, LlamaForCausalLM),
    (Qwen2Config, Qwen2ForCausalLM),
    (Qwen3Config, Qwen3ForCausalLM),
]


def make_model(config=Qwen3Config, architecture=Qwen3ForCausalLM, dtype=torch.float32):
    """With norms and biases that are not the ones and zeros of a fresh model."""
    torch.manual_seed(0)
    model = architecture(config(**SIZES))

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            # Not the frequencies of the rotary embedding, as `from_pretrained`.
            parameter.data = parameter.data.to(dtype)
    return model


def with_engine_ops(*args):
    model = make_model(*args)
    use_engine_ops(model)
    return model


def heads(*shape, seed):
    return normal(*shape, seed=seed, dtype=torch.bfloat16)


def query_key_value():
    """Of three rows with 7 tokens, `(3, heads, 7, 32)`: 4 heads, and 2 of keys and values."""
    return heads(3, 4, 7, 32, seed=1), heads(3, 2, 7, 32, seed=2), heads(3, 2, 7, 32, seed=3)


def leaves(tensors):
    """Copies whose gradients can be asked for."""
    return [tensor.clone().requires_grad_() for tensor in tensors]


def token_ids():
    return torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))


def explicit_attention(query, key, value, mask, scale):
    """By whole matrices in float64, `(batch, tokens, heads, head_dim)`; a padded query sees itself."""
    per_kv_head = query.shape[1] // key.shape[1]
    key = key.double().repeat_interleave(per_kv_head, dim=1)
    value = value.double().repeat_interleave(per_kv_head, dim=1)
    scores = query.double() @ key.transpose(-1, -2) * scale

    visible = torch.ones(scores.shape[-2:]).tril().bool()
    if mask is not None:
        visible = (visible & mask.bool()[:, None, None]) | torch.eye(len(visible)).bool()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


MASKS = {
    "full": None,
    "padded": torch.tensor([[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0, 0]]),
}


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        (Qwen3Config, {}, None),
        (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding-window"),
        (LlamaConfig, {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        (MistralConfig, {}, "'mistral' is none of llama, qwen2, qwen3"),
    ],
)
def test_what_cannot_follow_the_engine_says_why(config, changes, why):
    reason = unsupported(config(**SIZES | changes))

    if why is None:
        assert reason is None
    else:
        assert why in reason


def test_names_classes_and_parameters_stay():
    stock = make_model()
    model = make_model()
    assert not has_engine_ops(model)

    use_engine_ops(model)

    assert has_engine_ops(model)
    # FSDP wraps by the names of classes, and by the class of the first layer.
    for (name, module), (stock_name, stock_module) in zip(model.named_modules(), stock.named_modules(), strict=True):
        assert name == stock_name
        assert type(module).__name__ == type(stock_module).__name__, name
    first, second = model.model.layers
    assert type(first) is type(second)
    assert isinstance(first, type(stock.model.layers[0]))

    # A checkpoint of one loads into the other.
    state = model.state_dict()
    assert list(state) == list(stock.state_dict())
    torch.testing.assert_close(state, stock.state_dict(), rtol=0, atol=0)


def test_a_second_call_adds_no_hook():
    model = with_engine_ops()
    hooks = len(model.model.rotary_emb._forward_hooks)

    use_engine_ops(model)

    assert len(model.model.rotary_emb._forward_hooks) == hooks


def test_the_saved_config_stays(tmp_path):
    make_model().save_pretrained(tmp_path / "stock")
    with_engine_ops().save_pretrained(tmp_path / "engine")

    saved = (tmp_path / "engine" / "config.json").read_text()
    assert saved == (tmp_path / "stock" / "config.json").read_text()


# Beside vLLM's kernels ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_rounding_is_that_of_the_rotary_kernel():
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb
    from vllm import _custom_ops as ops

    def in_rows(states):
        """`(1, heads, 40, 32)` as `(40, heads * 32)`."""
        return states[0].transpose(0, 1).reshape(40, -1)

    model = with_engine_ops(Qwen3Config, Qwen3ForCausalLM, torch.bfloat16)
    query = heads(1, 4, 40, 32, seed=1)
    key = heads(1, 2, 40, 32, seed=2)
    positions = torch.arange(40)
    cos, sin = model.model.rotary_emb(query, positions[None])

    rotated_query, rotated_key = apply_rotary_pos_emb(query, key, cos, sin)
    to_bfloat16 = kernels.rounding()

    engine_query = in_rows(query).clone()
    engine_key = in_rows(key).clone()
    table = torch.cat((cos[0, :, :16], sin[0, :, :16]), dim=-1).bfloat16()
    ops.rotary_embedding(positions, engine_query, engine_key, 32, table, True)
    assert same_bytes(in_rows(to_bfloat16(rotated_query)), engine_query)
    assert same_bytes(in_rows(to_bfloat16(rotated_key)), engine_key)
    # Control: transformers rounds each product.
    stock_query, _ = apply_rotary_pos_emb(query, key, cos.bfloat16(), sin.bfloat16())
    assert not same_bytes(in_rows(stock_query), engine_query)


@pytest.mark.slow
def test_cosine_and_sine_are_those_of_the_engines_table():
    """At every position of a long context."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    # Qwen3's own base and context.
    rope = {"rope_type": "default", "rope_theta": 1e6}
    length = 40_960
    with set_current_vllm_config(VllmConfig()):
        engine = get_rope(128, length, rope_parameters=rope, dtype=torch.bfloat16).cos_sin_cache
    embedding = Qwen3RotaryEmbedding(Qwen3Config(head_dim=128, rope_parameters=rope))

    cos, sin = embedding(torch.zeros(1), torch.arange(length)[None])

    table = torch.cat((cos[0, :, :64], sin[0, :, :64]), dim=-1)
    assert same_bytes(table.bfloat16(), engine)


@pytest.mark.slow
def test_the_sum_of_residual_and_branch_is_normalized_before_it_is_rounded():
    from vllm.ir.ops.layernorm import fused_add_rms_norm

    norm = make_model(dtype=torch.bfloat16).model.norm
    branch = heads(30, 64, seed=1)
    residual = heads(30, 64, seed=2)
    engine_norm = fused_add_rms_norm.impls["native"].impl_fn
    expected, _ = engine_norm(branch, residual, norm.weight.data, norm.variance_epsilon)
    stock = norm(branch + residual)

    # As `use_engine_ops` does it: the same module with other methods.
    norm.__class__ = ops._form_of(type(norm), EngineRMSNorm)

    assert same_bytes(norm(branch.float() + residual.float()), expected)
    # Control: transformers normalizes the rounded sum.
    assert not same_bytes(stock, expected)


def real_tokens(mask):
    """The columns of the real tokens of each row, which lie side by side."""
    columns = []
    for row in mask:
        # Of equal numbers `argmax` takes the first.
        first = int(row.argmax())
        columns.append(slice(first, first + int(row.sum())))
    return columns


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_is_the_engines_kernel_on_each_sequence_alone(mask):
    query, key, value = query_key_value()

    output, _ = engine_attention(None, query, key, value, mask, 0.2)

    columns = real_tokens(torch.ones(3, 7) if mask is None else mask)
    for row, real in enumerate(columns):
        sequence = (query[row : row + 1, :, real], key[row : row + 1, :, real], value[row : row + 1, :, real])
        alone, _ = engine_attention(None, *sequence, None, 0.2)
        assert same_bytes(output[row, real], alone[0])
        # Measured 4.0e-3: the result is cut off to 8 bits.
        assert relative_error(alone, explicit_attention(*sequence, None, 0.2)) < 6e-3
    if mask is not None:
        assert (output[~mask.bool()] == 0).all()


def packed(states, mask):
    """The real tokens of `(batch, heads, tokens, head_dim)` in one row."""
    return states.transpose(1, 2)[mask.bool()].transpose(0, 1)[None]


def attention_and_gradients(states, mask, lengths, grad):
    inputs = leaves(states)
    output, _ = engine_attention(None, *inputs, mask, 0.2, sequence_lengths=lengths)
    return output, torch.autograd.grad(output, inputs, grad)


@pytest.mark.slow
def test_attention_of_a_packed_row_is_that_of_padded_ones_with_its_gradients():
    mask = MASKS["padded"]
    real = mask.bool()
    padded = query_key_value()
    grad = normal(3, 7, 4, 32, seed=4, dtype=torch.bfloat16) * mask[:, :, None, None]
    expected, expected_grads = attention_and_gradients(padded, mask, None, grad)

    row = []
    for states in padded:
        row.append(packed(states, mask))
    row_grad = grad[real][None]
    lengths = tuple(mask.sum(1).tolist())
    output, grads = attention_and_gradients(row, None, lengths, row_grad)

    assert same_bytes(output[0], expected[real])
    for row_gradient, padded_gradient in zip(grads, expected_grads, strict=True):
        assert same_bytes(row_gradient, packed(padded_gradient, mask))
    across, _ = attention_and_gradients(row, None, (sum(lengths),), row_grad)
    # Control: as one long sequence.
    assert not same_bytes(across, output)


def one_request(query, key, value):
    """vLLM's kernel over the last tokens of a sequence, `(queries, heads, size)`, as one request."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens, kv_heads, size = key.shape
    queries, heads, _ = query.shape
    block = 128
    isa = _get_attn_isa(torch.bfloat16, block, size)

    num_blocks = -(-tokens // block)
    key_cache, value_cache = torch.zeros(2, num_blocks, kv_heads, block, size, dtype=torch.bfloat16)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, torch.arange(tokens), isa)

    query_start_loc = torch.tensor([0, queries], dtype=torch.int32)
    seq_lens = torch.tensor([tokens], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        seq_lens=seq_lens,
        dtype=torch.bfloat16,
        query_start_loc=query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=False,
    )

    output = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        scale=0.2,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        softcap=0.0,
        scheduler_metadata=schedule,
        s_aux=None,
    )
    return output


@pytest.mark.slow
def test_a_token_attends_as_in_an_engine_that_decodes():
    # The control needs 1,000 tokens on an EPYC and more than that on a Xeon with AMX: 2,000.
    key = heads(2700, 2, 128, seed=1)
    value = heads(2700, 2, 128, seed=2)
    query = heads(2700, 4, 128, seed=3)
    long = slice(100, 2600)

    output = kernels.attention(query, key, value, [100, 2500, 100], 0.2)[long]

    query = query[long]
    key = key[long]
    value = value[long]
    # Of the dtype of one request: that of `output` would hide another.
    decoded = torch.empty_like(query)
    for t in range(2500):
        # One token after the other: a request that has answered all before it.
        decoded[t] = one_request(query[t : t + 1], key[: t + 1], value[: t + 1])[0]
    assert same_bytes(output, decoded)
    # Control: as one query, a prompt.
    assert not same_bytes(one_request(query, key, value), decoded)


@pytest.mark.slow
def test_gradients_are_those_of_exact_attention_at_the_rounded_inputs():
    mask = MASKS["padded"]
    query = normal(3, 4, 7, 32, seed=1)
    key = normal(3, 2, 7, 32, seed=2)
    value = heads(3, 2, 7, 32, seed=3)
    inputs = leaves((query, key, value))
    output, _ = engine_attention(None, *inputs, mask, 0.2)
    # Padding has no gradient: a loss does not read its output.
    grad = normal(*output.shape, seed=4) * mask[:, :, None, None]

    grads = torch.autograd.grad(output, inputs, grad.to(output.dtype))

    to_bfloat16 = kernels.rounding()
    rounded = leaves((to_bfloat16(query).double(), to_bfloat16(key).double(), value.double()))
    exact = explicit_attention(*rounded, mask, 0.2)
    exact_grads = torch.autograd.grad(exact, rounded, grad.bfloat16().double())
    for input_grad, exact_grad, source in zip(grads, exact_grads, (query, key, value), strict=True):
        assert input_grad.dtype == source.dtype
        # Measured 1e-7 where the gradient is float32, 1.6e-3 for the value, whose gradient is bfloat16.
        assert relative_error(input_grad, exact_grad) < (1e-6 if source.dtype == torch.float32 else 3e-3)


@pytest.mark.avx512
def test_gradients_are_straight_through_at_the_keys_and_values_of_a_cache():
    query = normal(3, 4, 7, 32, seed=1)
    key = normal(3, 2, 7, 32, seed=2)
    value = normal(3, 2, 7, 32, seed=3)
    inputs = leaves((query, key, value))
    output, _ = engine_attention(None, *inputs, None, 0.2, cache_dtype="fp8")
    grad = normal(*output.shape, seed=4)

    grads = torch.autograd.grad(output, inputs, grad.to(output.dtype))

    def at(query, key, value):
        """The gradients of exact attention at these inputs."""
        inputs = leaves((query.double(), key.double(), value.double()))
        exact = explicit_attention(*inputs, None, 0.2)
        return torch.autograd.grad(exact, inputs, grad.bfloat16().double())

    to_bfloat16 = kernels.rounding()
    query = to_bfloat16(query)
    key = to_bfloat16(key)
    expected = at(query, round_to_cache(key, "fp8"), round_to_cache(value.bfloat16(), "fp8"))
    unrounded = at(query, key, value.bfloat16())
    for input_grad, exact_grad, other in zip(grads, expected, unrounded, strict=True):
        assert relative_error(input_grad, exact_grad) < 1e-6
        # Control: at keys and values in bfloat16.
        assert relative_error(other, exact_grad) > 1e-2


def test_the_backward_keeps_no_square_of_a_sequence():
    query, key, value = leaves(heads(3, 1, 4, 1024, 32, seed=0))
    output, _ = engine_attention(None, query, key, value, None, 32**-0.5, sequence_lengths=(1000, 24))

    with torch.profiler.profile(profile_memory=True) as profile:
        output.float().sum().backward()

    largest = max(event.self_cpu_memory_usage for event in profile.events())
    # Bytes: a square of the longer one would have four heads x 4 bytes x 1000 x 1000.
    assert largest < 4 * 1000 * 1000


# Whole models -------------------------------------------------------------------------------------------------------


def logits_of(model, ids, **inputs):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=ids, **inputs).logits


def gradients_of(model, ids):
    model.train()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "architecture"), MODELS)
def test_padding_and_packing_change_no_bit(config, architecture):
    stock = make_model(config, architecture)
    model = with_engine_ops(config, architecture)
    ids = token_ids()
    expected = logits_of(model, ids)

    # Four columns on the left and three on the right, as TRL pads prompts and completions.
    padded = F.pad(ids, (4, 3))
    mask = F.pad(torch.ones_like(ids), (4, 3))
    of_padded = logits_of(model, padded, attention_mask=mask)[:, 4:-3]
    assert same_bytes(of_padded, expected)
    stock_of_padded = logits_of(stock, padded, attention_mask=mask)[:, 4:-3]
    # Control: padding does change the stock model.
    assert not same_bytes(stock_of_padded, logits_of(stock, ids))

    row = ids.view(1, -1)
    positions = torch.arange(9).repeat(1, 2)
    of_row = logits_of(model, row, position_ids=positions, sequence_lengths=(9, 9))
    assert same_bytes(of_row.view(expected.shape), expected)
    with pytest.raises(RuntimeError, match="would reach across"):
        logits_of(model, row, position_ids=positions)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "architecture"), MODELS)
def test_the_master_weights_dtype_changes_no_bit(config, architecture):
    ids = token_ids()
    of_float32 = logits_of(with_engine_ops(config, architecture), ids)

    of_bfloat16 = with_engine_ops(config, architecture, torch.bfloat16)(input_ids=ids).logits

    assert same_bytes(of_bfloat16, of_float32)
    # The same model but for roundings: measured 0.7 % to 1.4 % apart.
    of_stock = logits_of(make_model(config, architecture), ids)
    assert 0 < relative_error(of_float32, of_stock) < 0.03


@pytest.mark.slow
def test_gradients_are_the_stock_models_but_for_roundings():
    ids = token_ids()
    stock_grads = gradients_of(make_model(), ids)
    model = with_engine_ops()

    grads = gradients_of(model, ids)

    assert grads.keys() == stock_grads.keys()
    for name, grad in grads.items():
        # Measured up to 0.029 in two layers of 64 wide, by bfloat16 roundings at other places.
        assert relative_error(grad, stock_grads[name]) < 0.05, name

    # Computed again, the forward is the same one: nothing in it depends on what ran before.
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradients_of(model, ids), grads, rtol=0, atol=0)


def test_float32_master_weights_outside_of_autocast_are_an_error():
    model = with_engine_ops()

    with pytest.raises(RuntimeError, match="dtype"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))


@pytest.mark.slow
def test_a_cache_of_transformers_is_an_error():
    model = with_engine_ops(Qwen3Config, Qwen3ForCausalLM, torch.bfloat16).eval()
    ids = torch.randint(1, 32, (2, 5))

    with pytest.raises(RuntimeError, match="has no cache"):
        model.generate(ids, max_new_tokens=3, pad_token_id=0)

    answer = model.generate(ids, max_new_tokens=3, pad_token_id=0, use_cache=False)
    assert answer.shape == (2, 8)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(("config", "architecture"), MODELS)
def test_a_model_that_left_the_engines_operations_is_as_before(config, architecture, copied):
    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    # The operations count positions without padding, on its left too.
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    expected = make_model(config, architecture)(tokens, attention_mask=mask).logits

    model = with_engine_ops(config, architecture)
    if copied:
        model = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)
    leave_engine_ops(model)

    assert not has_engine_ops(model)
    assert torch.equal(model(tokens, attention_mask=mask).logits, expected)
    # And a model that does not have them stays as it is.
    leave_engine_ops(model)
    assert torch.equal(model(tokens, attention_mask=mask).logits, expected)
    # Control: with them, it rounds.
    use_engine_ops(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(model(tokens, attention_mask=mask).logits, expected)


def test_a_model_without_quantization_is_off_the_engines_operations():
    """A script may give it to TRL's own trainer, or copy it for a teacher."""
    model = with_engine_ops(Qwen3Config, Qwen3ForCausalLM)
    apply_quantization(model, "W4A16", group_size=32)
    assert has_engine_ops(model)  # control

    remove_quantization(model)

    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    assert torch.equal(model(tokens).logits, make_model()(tokens).logits)
