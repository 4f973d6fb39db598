"""What leaves a run: the low-bit checkpoint, its model card, and both on the Hub."""

from .files import LOW_BIT_FOLDER, check_writable
from .low_bit import check_target, quantization_config, save_low_bit


__all__ = ["LOW_BIT_FOLDER", "check_target", "check_writable", "quantization_config", "save_low_bit"]
