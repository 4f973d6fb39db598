r"""Teach the form of an answer on SVAMP's training problems, with TRL: `python warm_start.py FOLDER`.

An answer is the calculation, which math-verify carries out: `\boxed{(8 - 3) * 2}`. A model of 135 million weights
cannot multiply, but it can learn what to multiply.
"""

import argparse
import json
import re
from pathlib import Path

from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def solution(equation: str) -> str:
    r"""`( ( 8.0 - 3.0 ) * 2.0 )` as `\boxed{(8 - 3) * 2}`."""
    text = re.sub(r"(\d)\.0\b", r"\1", equation).replace("( ", "(").replace(" )", ")")
    return rf"\boxed{{{text.removeprefix('(').removesuffix(')')}}}"


def demonstrations(file: Path) -> Dataset:
    """Prompts and completions as chat messages."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return Dataset.from_list([
        {
            "prompt": [{"role": "user", "content": row["problem"]}],
            "completion": [{"role": "assistant", "content": solution(row["equation"])}],
        }
        for row in rows
    ]).shuffle(seed=0)  # fmt: skip


def main() -> None:
    """Read the options, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="has base/ and train.jsonl, gets start/")
    parser.add_argument("--max_steps", type=int, default=-1, help="batches of 16 problems (default: all, once)")
    options = parser.parse_args()
    args = SFTConfig(
        str(options.folder / "start"),
        num_train_epochs=1,
        max_steps=options.max_steps,
        per_device_train_batch_size=16,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        gradient_checkpointing=False,
        bf16=True,
        use_cpu=True,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        str(options.folder / "base"), args, train_dataset=demonstrations(options.folder / "train.jsonl")
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
