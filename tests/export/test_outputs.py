"""`qarl_trl.export.outputs`: what each kind of run writes, into its output folder and into a checkpoint."""

from types import SimpleNamespace

import pytest

from qarl_trl.export.outputs import Outputs, outputs_of


# Three kinds of runs: in high precision, with master weights, and on a frozen base.
FULL = {"quantized": False, "frozen": False, "export_low_bit": True}
LOW_BIT = FULL | {"quantized": True}
FROZEN = LOW_BIT | {"frozen": True}


@pytest.mark.parametrize(
    ("settings", "is_adapter", "in_checkpoint", "expected"),
    [
        (FULL, False, False, Outputs(low_bit=None, high_precision=True, frozen_base=False, card="full")),
        (FULL, False, True, Outputs(low_bit=None, high_precision=True, frozen_base=False, card="full")),
        (FULL, True, False, Outputs(low_bit=None, high_precision=True, frozen_base=False, card="adapter")),
        # "" is the output folder itself, with the low-bit model alone. In a checkpoint master weights have that place.
        (LOW_BIT, False, False, Outputs(low_bit="", high_precision=False, frozen_base=False, card=None)),
        (LOW_BIT, False, True, Outputs(low_bit="low_bit", high_precision=True, frozen_base=False, card=None)),
        (LOW_BIT, True, False, Outputs("low_bit", high_precision=True, frozen_base=False, card="merged_adapter")),
        (LOW_BIT, True, True, Outputs("low_bit", high_precision=True, frozen_base=False, card="merged_adapter")),
        (FROZEN, True, False, Outputs(low_bit=None, high_precision=True, frozen_base=True, card="frozen_adapter")),
        (FROZEN, True, True, Outputs(low_bit=None, high_precision=True, frozen_base=True, card="frozen_adapter")),
    ],
)
def test_a_run_writes_what_its_kind_says(settings, is_adapter, in_checkpoint, expected):
    assert outputs_of(SimpleNamespace(**settings), is_adapter, in_checkpoint) == expected


def test_without_export_low_bit_only_checkpoints_lack_the_low_bit_model():
    args = SimpleNamespace(**LOW_BIT | {"export_low_bit": False})

    assert outputs_of(args, is_adapter=False, in_checkpoint=True).low_bit is None
    assert outputs_of(args, is_adapter=False, in_checkpoint=False).low_bit == ""  # control
