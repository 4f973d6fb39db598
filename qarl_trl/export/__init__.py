"""Export a run: write the low-bit checkpoint and its model card, and push both to the Hub."""

from .files import LOW_BIT_FOLDER, check_writable
from .low_bit import check_adapter_target, check_target, quantization_config, save_low_bit


__all__ = [
    "LOW_BIT_FOLDER",
    "check_adapter_target",
    "check_target",
    "check_writable",
    "quantization_config",
    "save_low_bit",
]
