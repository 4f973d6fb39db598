"""`qarl_trl.learner.attention`: sdpa within each sequence of a packed row, stock sdpa otherwise."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import sdpa_mask

from qarl_trl.learner import attention
from qarl_trl.learner.attention import (
    attend_from_cache,
    attending_from_cache,
    sequence_arguments,
    use_packed_attention,
)
from qarl_trl.quant.kv_cache import attend_without_cache, round_to_cache


# The mask of a packed row: without elements.
PACKED = torch.empty(1, 1, 0, 0)

# Two sequences of three tokens in one row.
IDS = torch.ones(1, 6, dtype=torch.long)
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2]])


def random_heads(seed):
    """A query, key or value: `(1, 2 heads, 12 tokens, 8)`."""
    return torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(seed))


def both_sequences():
    """Two sequences of nine tokens, ids `(2, 9)`."""
    return torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def causal_attention(query, key, value):
    """Attention of one sequence by its formula, `(heads, tokens, head_dim)`."""
    length, size = query.shape[-2:]
    scores = query @ key.transpose(1, 2) / size**0.5
    future = ~torch.ones(length, length).tril().bool()
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ value


def test_each_sequence_of_a_row_is_attended_alone():
    query = random_heads(1)
    key = random_heads(2)
    value = random_heads(3)

    output, _ = attention.packed_attention(torch.nn.Module(), query, key, value, PACKED, (5, 3, 4))

    # Three lengths, so that a sequence that begins in the wrong place shows.
    for tokens in (slice(0, 5), slice(5, 8), slice(8, 12)):
        expected = causal_attention(query[0, :, tokens], key[0, :, tokens], value[0, :, tokens])
        assert (output[0, tokens].transpose(0, 1) - expected).abs().max() < 1e-6


def test_a_row_whose_positions_restart_without_lengths_is_an_error(tiny_model):
    model = tiny_model()
    use_packed_attention(model)

    with pytest.raises(RuntimeError, match="would reach across"):
        model(input_ids=IDS, position_ids=POSITIONS, use_cache=False)

    control = model(input_ids=IDS, position_ids=POSITIONS, use_cache=False, sequence_lengths=(3, 3))
    assert control.logits.isfinite().all()


class CountOutputs(TorchDispatchMode):
    """Elements that all operations in the block wrote."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.elements += leaf.numel()
        return output


def written_by_backward(lengths):
    """Elements that the backward of a row of 64 tokens writes."""
    # Whatever the numbers are: only elements are counted.
    query, key, value = torch.randn(3, 1, 2, 64, 8)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    output, _ = attention.packed_attention(torch.nn.Module(), query, key, value, PACKED, lengths)

    with CountOutputs() as count:
        output.sum().backward()
    return count.elements


def test_the_backward_costs_the_same_for_many_short_sequences_as_for_few():
    """Slices of a row would each get a gradient of the whole row: 16 times the elements for 16 times the sequences."""
    assert written_by_backward((4,) * 16) < 1.5 * written_by_backward((16,) * 4)


@pytest.fixture
def masks(monkeypatch):
    """The masks that the attention of each layer gets from now on."""
    seen = []
    inner = attention.packed_attention

    def recording(module, query, key, value, attention_mask, *args, **kwargs):
        seen.append(attention_mask)
        return inner(module, query, key, value, attention_mask, *args, **kwargs)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.ATTENTION, recording)
    return seen


def test_no_square_of_a_packed_row_is_made(tiny_model, masks):
    model = tiny_model()
    use_packed_attention(model)

    model(input_ids=IDS, position_ids=POSITIONS, use_cache=False, sequence_lengths=(3, 3))

    # One mask for each layer, without elements.
    assert [mask.numel() for mask in masks] == [0, 0]


def test_other_rows_get_the_masks_of_stock_sdpa(tiny_model, masks):
    model = tiny_model()
    use_packed_attention(model)

    model(input_ids=IDS, use_cache=False)
    assert masks == [None, None]

    model(input_ids=IDS, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]), use_cache=False)
    padding = torch.tensor([[False, True, True, True, True, True]])
    assert torch.equal(masks[-1], sdpa_mask(1, 6, 6, attention_mask=padding))


def test_padded_and_generated_the_model_is_the_stock_one_bit_for_bit(tiny_model):
    stock = tiny_model()
    model = tiny_model()
    use_packed_attention(model)
    ids = both_sequences()
    # Padding on both sides, as TRL has it, and a row without any.
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0], [1] * 9])

    assert torch.equal(model(ids, attention_mask=mask).logits, stock(ids, attention_mask=mask).logits)

    sampling = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **sampling), stock.generate(ids, **sampling))
    # The config is what a checkpoint saves.
    assert model.config.to_dict() == stock.config.to_dict()


def test_another_attention_is_left_alone(tiny_model):
    model = tiny_model(attn_implementation="eager")

    use_packed_attention(model)

    assert model.config._attn_implementation == "eager"


def test_flash_attention_gets_its_own_arguments(tiny_model):
    model = tiny_model(attn_implementation="eager")
    device = torch.device("cpu")
    assert sequence_arguments(model, (3, 4), device) == {"sequence_lengths": (3, 4)}

    model.config._attn_implementation_internal = "flash_attention_2"
    arguments = sequence_arguments(model, (3, 4), device)

    assert arguments["cu_seq_lens_q"].tolist() == arguments["cu_seq_lens_k"].tolist() == [0, 3, 7]
    assert arguments["cu_seq_lens_q"].dtype == torch.int32
    assert arguments["max_length_q"] == arguments["max_length_k"] == 4


# An FP8 cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def states(monkeypatch):
    """Keys and values of every call of torch's sdpa from now on."""
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def recording(query, key, value, *args, **kwargs):
        seen.append((key, value))
        return attend(query, key, value, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    return seen


def are_of_cache(states):
    """Of each key and value, one after the other: whether rounding it once more changes nothing."""
    return [torch.equal(tensor, round_to_cache(tensor, "fp8")) for pair in states for tensor in pair]


@pytest.mark.parametrize("packs_first", [False, True])
def test_every_layer_attends_to_keys_and_values_as_the_cache_holds_them(tiny_model, states, packs_first):
    """In packed and in padded rows, whether the trainer packs (`max_tokens_per_pass`) or not."""
    model = tiny_model()
    if packs_first:
        use_packed_attention(model)
    model(IDS, attention_mask=torch.ones_like(IDS), use_cache=False)
    # Control: without such a cache they are not numbers of the format.
    assert not any(are_of_cache(states))
    states.clear()

    attend_from_cache(model, "fp8")
    use_packed_attention(model)
    model(IDS, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]), use_cache=False)
    model(IDS, position_ids=POSITIONS, use_cache=False, sequence_lengths=(3, 3))

    # Two layers: once for the padded row, twice for the sequences of the packed one.
    assert len(states) == 2 + 4
    assert all(are_of_cache(states))


def test_a_packed_row_has_the_log_probs_of_its_sequences(tiny_model):
    model = tiny_model()
    attend_from_cache(model, "fp8")
    ids = both_sequences()

    rows = model(ids, use_cache=False).logits
    packed = model(
        ids.view(1, 18),
        position_ids=torch.arange(9).repeat(1, 2),
        use_cache=False,
        sequence_lengths=(9, 9),
    ).logits

    assert (packed.view(rows.shape) - rows).abs().max() < 1e-5


def test_gradients_pass_the_rounding(tiny_model):
    """To the weights of keys, values and everything before; they are those at the rounded keys and values."""
    model = tiny_model()
    # Of the first layer: a backward comes through the roundings of all others before.
    model(IDS, use_cache=False).logits.sum().backward()
    of_stock = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
    model.zero_grad()

    attend_from_cache(model, "fp8")
    model(IDS, use_cache=False).logits.sum().backward()

    # A rounding that is differentiated has a gradient of 0 almost everywhere.
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad
    assert gradient.abs().max() > 0
    assert not torch.equal(gradient, of_stock)  # control


def test_after_the_block_the_attention_is_that_of_before(tiny_model):
    model = tiny_model()
    ids = both_sequences()
    before = model(ids, use_cache=False).logits

    with attending_from_cache(model, "fp8"):
        inside = model(ids, use_cache=False).logits
    with attending_from_cache(model, None):
        unchanged = model(ids, use_cache=False).logits

    assert torch.equal(model(ids, use_cache=False).logits, before)
    assert torch.equal(unchanged, before)
    assert not torch.equal(inside, before)


@pytest.mark.parametrize("packs", [False, True])
def test_a_second_run_may_have_another_cache_or_none(tiny_model, packs):
    """Of one model in a notebook."""
    model = tiny_model()
    if packs:
        use_packed_attention(model)
    ids = both_sequences()
    before = model(ids, use_cache=False).logits

    attend_from_cache(model, "fp8")
    attend_from_cache(model, "fp8_e5m2")
    second = model(ids, use_cache=False).logits
    attend_without_cache(model)

    assert torch.equal(model(ids, use_cache=False).logits, before)
    # Control: the second cache rounds, and not after the first.
    fresh = tiny_model()
    attend_from_cache(fresh, "fp8_e5m2")
    assert torch.equal(fresh(ids, use_cache=False).logits, second)
    assert not torch.equal(second, before)


def test_another_attention_has_no_cache(tiny_model):
    model = tiny_model(attn_implementation="eager")

    with pytest.raises(ValueError, match="kv_cache_dtype='fp8' needs attn_implementation: sdpa.*got 'eager'"):
        attend_from_cache(model, "fp8")


# `old` and the loss --------------------------------------------------------------------------------------------------


def kernels_of(model, monkeypatch, grad):
    """What torch knows when it chooses a kernel in each call of a packed pass, and its choice; and the logits."""
    calls = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def recording(query, key, value, attn_mask=None, **kwargs):
        # torch's own choice for this call, with gradients or without: a number of `SDPBackend`.
        backend = torch._fused_sdp_choice(query, key, value, attn_mask, **kwargs)
        needs_gradient = torch.is_grad_enabled() and query.requires_grad
        calls.append((needs_gradient, backend, query.shape, attn_mask is None, kwargs))
        return attend(query, key, value, attn_mask=attn_mask, **kwargs)

    with monkeypatch.context() as patch, torch.set_grad_enabled(grad):
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
        logits = model(input_ids=IDS, position_ids=POSITIONS, use_cache=False, sequence_lengths=(2, 4)).logits
    return calls, logits


def test_a_pass_without_gradients_takes_the_kernels_of_a_training_pass(tiny_model, monkeypatch):
    model = tiny_model()
    use_packed_attention(model)

    of_loss, logits = kernels_of(model, monkeypatch, grad=True)
    of_old, logits_of_old = kernels_of(model, monkeypatch, grad=False)

    # Two sequences in each layer.
    assert len(of_loss) == 2 * model.config.num_hidden_layers
    assert of_old == of_loss
    assert all(needs_gradient for needs_gradient, *_ in of_loss)
    assert torch.equal(logits_of_old, logits)
    assert not logits_of_old.requires_grad

    # Control: as torch would choose.
    monkeypatch.setattr(attention, "_as_in_training", lambda tensor: tensor)
    without, _ = kernels_of(model, monkeypatch, grad=False)
    assert without != of_loss


def test_a_pass_without_gradients_keeps_nothing_for_a_backward():
    """Else the activations of all layers would stay until the end of the pass."""
    query, key, value = map(random_heads, range(3))
    with torch.no_grad():
        output, _ = attention.packed_attention(torch.nn.Module(), query, key, value, PACKED, (5, 7))

    assert output.grad_fn is None
    assert not output.requires_grad
    assert not query.requires_grad
