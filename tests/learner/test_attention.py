"""`qarl_trl.learner.attention`: sdpa within each sequence of a packed row, stock sdpa otherwise."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import sdpa_mask

from qarl_trl.learner import attention
from qarl_trl.learner.attention import sequence_arguments, use_packed_attention


def row(seed, heads=2):
    return torch.randn(1, heads, 12, 8, generator=torch.Generator().manual_seed(seed))


def test_each_sequence_of_a_row_is_attended_alone():
    query, key, value = row(1), row(2), row(3)
    found, _ = attention.packed_attention(torch.nn.Module(), query, key, value, torch.empty(1, 1, 0, 0), (5, 3, 4))
    start = 0
    for length in (5, 3, 4):
        q, k, v = (t[0, :, start : start + length] for t in (query, key, value))
        scores = q @ k.transpose(1, 2) / 8**0.5
        scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
        assert (found[0, start : start + length].transpose(0, 1) - scores.softmax(-1) @ v).abs().max() < 1e-6
        start += length


def test_a_row_that_starts_anew_without_lengths_is_an_error(tiny_model):
    model = tiny_model()
    use_packed_attention(model)
    ids, positions = torch.ones(1, 6, dtype=torch.long), torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(RuntimeError, match="would reach across"):
        model(input_ids=ids, position_ids=positions, use_cache=False)
    assert (
        model(input_ids=ids, position_ids=positions, use_cache=False, sequence_lengths=(3, 3)).logits.isfinite().all()
    )


def test_the_backward_costs_the_same_for_many_short_sequences_as_for_few():
    """Slices of a row would each get a gradient of the whole row: 16 times the elements for 16 times the sequences (F8)."""

    def written(lengths):
        query, key, value = (torch.randn(1, 2, 64, 8).requires_grad_() for _ in range(3))
        output, _ = attention.packed_attention(torch.nn.Module(), query, key, value, torch.empty(1, 1, 0, 0), lengths)
        with CountOutputs() as count:
            output.sum().backward()
        return count.elements

    assert written((4,) * 16) < 1.5 * written((16,) * 4)


class CountOutputs(TorchDispatchMode):
    """Elements that all operations in the block wrote."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        self.elements += sum(t.numel() for t in tree_leaves(output) if isinstance(t, torch.Tensor))
        return output


def test_no_square_of_the_row_is_made(tiny_model, monkeypatch):
    model = tiny_model()
    use_packed_attention(model)
    seen = []
    inner = attention.packed_attention
    monkeypatch.setitem(
        attention.AttentionInterface._global_mapping,
        attention.ATTENTION,
        lambda *args, **kwargs: seen.append(args[4]) or inner(*args, **kwargs),
    )
    ids, positions = torch.ones(1, 6, dtype=torch.long), torch.tensor([[0, 1, 2, 0, 1, 2]])
    model(input_ids=ids, position_ids=positions, use_cache=False, sequence_lengths=(3, 3))
    assert [mask.numel() for mask in seen] == [0, 0]  # one a layer
    del seen[:]
    model(input_ids=ids, use_cache=False)
    assert seen == [None, None]
    model(input_ids=ids, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]), use_cache=False)
    expected = sdpa_mask(1, 6, 6, attention_mask=torch.tensor([[False, True, True, True, True, True]]))
    assert torch.equal(seen[-1], expected)


def test_padded_and_generated_the_model_is_the_stock_one_bit_for_bit(tiny_model):
    stock, model = tiny_model(), tiny_model()
    use_packed_attention(model)
    ids = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0], [1] * 9])
    assert torch.equal(model(ids, attention_mask=mask).logits, stock(ids, attention_mask=mask).logits)
    answers = [m.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False) for m in (model, stock)]
    assert torch.equal(*answers)
    assert model.config.to_dict() == stock.config.to_dict()  # what is saved


def test_only_sdpa_is_replaced_and_flash_attention_gets_its_own_arguments(tiny_model):
    model = tiny_model(attn_implementation="eager")
    use_packed_attention(model)
    assert model.config._attn_implementation == "eager"
    device = torch.device("cpu")
    assert sequence_arguments(model, (3, 4), device) == {"sequence_lengths": (3, 4)}
    model.config._attn_implementation_internal = "flash_attention_2"
    found = sequence_arguments(model, (3, 4), device)
    assert found["cu_seq_lens_q"].tolist() == found["cu_seq_lens_k"].tolist() == [0, 3, 7]
    assert found["cu_seq_lens_q"].dtype == torch.int32
    assert found["max_length_q"] == found["max_length_k"] == 4
