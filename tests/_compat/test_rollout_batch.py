"""A rollout batch: which rows are text, and the order of its rows."""

import sys

import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer, SFTTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.experimental.sdpo import SDPOTrainer
from trl.trainer.utils import shuffle_sequence_dict

from qarl_trl._compat.rollout_batch import home_of_rewards, in_order, is_text


def test_images_and_token_types_are_no_text():
    """They are never packed."""
    text = {"model": 1, "input_ids": 1, "attention_mask": 1, "logits_to_keep": 1, "batch_size": 1}

    assert is_text(text | {"pixel_values": None})
    # "new" stands for an argument that a later TRL adds, of which nobody knows whether packed rows may have it.
    for name in ("pixel_values", "mm_token_type_ids", "new"):
        assert not is_text(text | {name: 1})


def reverse(rows):
    return torch.arange(rows).flip(0)


def test_rows_of_tensors_and_lists_are_put_into_one_order():
    batch = {"ids": torch.tensor([[1, 2], [3, 4], [5, 6]]), "names": ["a", "b", "c"], "none": None}
    # A tensor without dimensions has no rows, as `num_items_in_batch` in a batch of TRL.
    batch["scalar"] = torch.tensor(7)

    ordered = in_order(batch, reverse)

    assert torch.equal(ordered["ids"], torch.tensor([[5, 6], [3, 4], [1, 2]]))
    assert ordered["names"] == ["c", "b", "a"]
    assert ordered["none"] is None
    assert torch.equal(ordered["scalar"], torch.tensor(7))
    # Control: there was something to order.
    assert batch["names"] == ["a", "b", "c"]


def test_in_trls_own_order_a_batch_is_what_trl_makes_of_it():
    batch = {"ids": torch.arange(10).view(5, 2), "names": [*"abcde"], "none": None, "scalar": torch.tensor(1.0)}

    # TRL draws its order from torch's generator, so one seed gives both functions the same permutation.
    torch.manual_seed(3)
    expected = shuffle_sequence_dict(batch)
    torch.manual_seed(3)
    ordered = in_order(batch, torch.randperm)

    assert [*ordered] == [*expected]
    assert torch.equal(ordered["ids"], expected["ids"])
    # The last part is a control: seed 3 draws another order than the batch has.
    assert ordered["names"] == expected["names"] != batch["names"]
    assert ordered["none"] is None
    assert torch.equal(ordered["scalar"], expected["scalar"])


def test_values_of_different_lengths_are_refused():
    """TRL's own function would leave rows out."""
    with pytest.raises(ValueError, match=r"one number of rows, got \[2, 3\]"):
        in_order({"ids": torch.zeros(2, 1), "names": ["a", "b", "c"]}, reverse)


def test_rewards_are_guarded_where_trl_gathers_them_by_name():
    """GMPO has GRPO's method, SDPO its own, which gathers by the accelerator."""
    homes = {
        GRPOTrainer: "trl.trainer.grpo_trainer",
        RLOOTrainer: "trl.trainer.rloo_trainer",
        GMPOTrainer: "trl.trainer.grpo_trainer",
        SDPOTrainer: None,
        SFTTrainer: None,
    }

    # A subclass, as users make them: the method is found in an ancestor.
    for trainer, home in homes.items():
        assert home_of_rewards(type("Mine", (trainer,), {})) == home
        # Control: the function that is replaced is there.
        assert home is None or hasattr(sys.modules[home], "gather")
