"""What leaves a run: the low-bit checkpoint, its model card, and both on the Hub."""

from .low_bit import LOW_BIT_FOLDER, check_target, flush, quantization_config, save_low_bit


__all__ = ["LOW_BIT_FOLDER", "check_target", "flush", "quantization_config", "save_low_bit"]
