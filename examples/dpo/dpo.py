"""DPO on 4-bit weights, by two classes of your own.

    python examples/dpo/dpo.py MODEL DATA OUTPUT [MAX_STEPS]

MODEL is a folder or Hub id, DATA a .jsonl file with the columns prompt, chosen and rejected. `vllm serve OUTPUT`
serves what was trained. For another trainer of TRL, put its config and its class in the place of DPO's.
"""

import sys
from dataclasses import dataclass

import torch
from trl import DPOConfig, DPOTrainer

from qarl_trl import LowBitConfig, LowBitMixin
from qarl_trl.data import load_rows


@dataclass
class LowBitDPOConfig(LowBitConfig, DPOConfig):
    """The fields of TRL's config, and those of low bits: quant_scheme, quant_group_size, ..."""


class LowBitDPOTrainer(LowBitMixin, DPOTrainer):
    """TRL's trainer. The policy's forward multiplies by low-bit weights, and `save_model` writes what vLLM loads."""


def main(model: str, data: str, output_dir: str, max_steps: str = "-1") -> None:
    """Train and save."""
    args = LowBitDPOConfig(
        output_dir,
        quant_scheme="W4A16",
        # -1: all epochs of TRL's config.
        max_steps=int(max_steps),
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    dataset = load_rows(data, "train")

    trainer = LowBitDPOTrainer(model, args=args, train_dataset=dataset)
    trainer.train()

    # In 4 bits, as the policy computed: there is nothing to quantize afterwards.
    trainer.save_model()


if __name__ == "__main__":
    # Positional, to keep the script short; examples/countdown reads any field from the command line.
    main(*sys.argv[1:])
