r"""Teach the form of an answer on SVAMP's training problems, with TRL: `python warm_start.py FOLDER`.

An answer is the calculation, which math-verify carries out: `\boxed{(8 - 3) * 2}`. A model of 135 million weights
cannot multiply, but it can learn what to multiply. The solutions are kept for distill.yaml: `solutions.jsonl`.
"""

import argparse
import json
import re
from pathlib import Path

from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def solution(equation: str) -> str:
    r"""`( ( 8.0 - 3.0 ) * 2.0 )` as `\boxed{(8 - 3) * 2}`."""
    whole = re.sub(r"(\d)\.0\b", r"\1", equation)
    tight = whole.replace("( ", "(").replace(" )", ")")
    # SVAMP puts brackets around each equation, which only cost tokens.
    calculation = tight.removeprefix("(").removesuffix(")")

    return rf"\boxed{{{calculation}}}"


def solved(file: Path) -> list[dict[str, str]]:
    """The problems of a file, each with its solution."""
    rows = []
    for line in file.read_text().splitlines():
        problem = json.loads(line)
        rows.append({"problem": problem["problem"], "solution": solution(problem["equation"])})
    return rows


def demonstrations(problems: list[dict[str, str]]) -> Dataset:
    """Prompts and completions as chat messages."""
    rows = []
    for problem in problems:
        rows.append(
            {
                "prompt": [{"role": "user", "content": problem["problem"]}],
                "completion": [{"role": "assistant", "content": problem["solution"]}],
            }
        )

    # With a seed of its own, so that everyone trains on the problems in the same order.
    return Dataset.from_list(rows).shuffle(seed=0)


def main() -> None:
    """Read the options, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="has base/ and train.jsonl, gets start/ and solutions.jsonl")
    parser.add_argument("--max_steps", type=int, default=-1, help="batches of 16 problems (default: all, once)")
    parser.add_argument(
        "--float32", action="store_true", help="products in float32, ten times as fast on a CPU without AVX512_BF16"
    )
    options = parser.parse_args()

    problems = solved(options.folder / "train.jsonl")
    lines = [json.dumps(problem) + "\n" for problem in problems]
    (options.folder / "solutions.jsonl").write_text("".join(lines))

    args = SFTConfig(
        str(options.folder / "start"),
        num_train_epochs=1,
        max_steps=options.max_steps,
        per_device_train_batch_size=16,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        gradient_checkpointing=False,
        # Master weights in float32, products in bfloat16: small updates of bfloat16 weights would be rounded away.
        bf16=not options.float32,
        use_cpu=True,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=5,
        # The model is saved once, at the end: the phase takes minutes.
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        str(options.folder / "base"),
        args,
        train_dataset=demonstrations(problems),
    )

    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
