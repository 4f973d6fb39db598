"""Your own data and reward in a script like TRL's: the countdown game, with LoRA on one GPU.

    python examples/countdown/countdown.py --config examples/countdown/lora.yaml

Any field of `QaRLConfig` and `ModelConfig` goes on the command line: `--report_to trackio`, `--loss_type grpo`,
`--quant_scheme FP8_DYNAMIC`.

The engine as a server on a second GPU, in two terminals of one user:

    CUDA_VISIBLE_DEVICES=1 qarl-trl serve --config examples/countdown/lora.yaml --sync_folder /dev/shm/countdown
    python examples/countdown/countdown.py --config examples/countdown/lora.yaml --vllm_mode server \
        --sync_folder /dev/shm/countdown
"""

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from trl import ModelConfig, TrlParser, get_peft_config

from qarl_trl import QaRLConfig, QaRLTrainer


QUESTION = (
    "Use the numbers {numbers}, each exactly once, with +, -, * and / to make {target}. "
    "Think, then give the expression alone in <answer> </answer>, as in <answer>(1 + 2) * 3</answer>."
)
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass
class ScriptArguments:
    """What the script needs beyond trainer and model."""

    num_problems: int = field(default=4000, metadata={"help": "Problems to train on."})


def make_problems(number: int, seed: int) -> Dataset:
    """Problems that have a solution, with the columns `prompt` (messages), `numbers` and `target`."""
    rng, rows = random.Random(seed), []
    while len(rows) < number:
        numbers = [rng.randint(1, 50) for _ in range(rng.choice([3, 4]))]
        expression = str(numbers[0]) + "".join(f" {rng.choice('+-*')} {n}" for n in numbers[1:])
        target, _ = evaluate(expression)
        if 10 <= target <= 100:
            shuffled = rng.sample(numbers, len(numbers))
            question = QUESTION.format(numbers=", ".join(map(str, shuffled)), target=int(target))
            prompt = [{"role": "user", "content": question}]
            rows.append({"prompt": prompt, "numbers": numbers, "target": int(target)})
    return Dataset.from_list(rows)


def evaluate(expression: str) -> tuple[float, list[int]]:
    """
    The value of an expression of whole numbers, `+ - * /` and brackets, and its numbers; `ValueError` for anything
    else.
    """
    used: list[int] = []

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return node.value
        raise ValueError(f"{expression!r} must be an expression of whole numbers and + - * /.")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body), used
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def countdown_reward(
    completions: Sequence[Any], numbers: Sequence[list[int]], target: Sequence[int], **_: Any
) -> list[float]:
    """
    1 for a last `<answer>` that makes the target of the numbers, each once; 0.1 for one that is an expression; else 0.

    TRL calls it with the completions, a column of the dataset for each other name, and more that is not needed here.
    """
    return [score(text_of(c), *problem) for c, *problem in zip(completions, numbers, target, strict=True)]


def text_of(completion: Any) -> str:
    """The text of a completion: chat messages where the prompt has them."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def score(text: str, numbers: list[int], target: int) -> float:
    """The reward of one completion."""
    answers = re.findall(r"<answer>(.{1,200}?)</answer>", text, re.DOTALL)
    try:
        found, used = evaluate(answers[-1]) if answers else (0.0, [])
    except ValueError:
        return 0.0
    right = sorted(used) == sorted(numbers) and abs(found - target) < 1e-6
    return 1.0 if right else 0.1 * bool(answers)


def main(argv: list[str] | None = None) -> QaRLTrainer:
    """Read the command line (by default the process's), train, save."""
    parser = TrlParser((ScriptArguments, QaRLConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config(argv)
    trainer = QaRLTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=countdown_reward,
        args=training_args,
        train_dataset=make_problems(script_args.num_problems, seed=training_args.seed),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
