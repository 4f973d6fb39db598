"""Your own data and reward in a script like TRL's: the countdown game, with LoRA on one GPU.

    python examples/countdown/countdown.py --config examples/countdown/lora.yaml

Any field of `QaRLConfig` and `ModelConfig` goes on the command line: `--report_to trackio`, `--loss_type grpo`,
`--quant_scheme FP8_DYNAMIC`.

The engine as a server on a second GPU, in two terminals of one user:

    CUDA_VISIBLE_DEVICES=1 qarl-trl serve --config examples/countdown/lora.yaml --sync_folder /dev/shm/countdown
    CUDA_VISIBLE_DEVICES=0 python examples/countdown/countdown.py --config examples/countdown/lora.yaml \
        --vllm_mode server --sync_folder /dev/shm/countdown
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
    rng = random.Random(seed)
    rows = []

    while len(rows) < number:
        how_many = rng.choice([3, 4])
        numbers = [rng.randint(1, 50) for _ in range(how_many)]

        # The target is the value of an expression, so that at least this one solves the problem.
        expression = str(numbers[0])
        for following in numbers[1:]:
            expression += f" {rng.choice('+-*')} {following}"
        target, _ = evaluate(expression)
        if not 10 <= target <= 100:
            continue

        # In another order than in the expression, which would give half of the solution away.
        shuffled = rng.sample(numbers, len(numbers))
        question = QUESTION.format(numbers=", ".join(map(str, shuffled)), target=int(target))

        # As messages, so that TRL applies the model's chat template.
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

        # By its type, because True is an instance of int.
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return node.value

        raise ValueError(f"{expression!r} must be an expression of whole numbers and + - * /.")

    # Parsed and walked, never passed to `eval`: the expression is a model's, which may write anything.
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return value(tree.body), used
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def countdown_reward(
    completions: Sequence[Any], numbers: Sequence[list[int]], target: Sequence[int], **_: Any
) -> list[float]:
    """
    1 for a last `<answer>` that makes the target of the numbers, each once; 0.1 for one that is an expression; else 0.

    TRL calls it with the completions, a column of the dataset for each other name, and more that is not needed here.
    """
    rewards = []
    for completion, its_numbers, its_target in zip(completions, numbers, target, strict=True):
        text = text_of(completion)
        rewards.append(score(text, its_numbers, its_target))

    return rewards


def text_of(completion: Any) -> str:
    """The text of a completion: chat messages where the prompt has them."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def score(text: str, numbers: list[int], target: int) -> float:
    """The reward of one completion."""
    # No answer of this game needs 200 characters, and a limit keeps the parser away from endless texts.
    answers = re.findall(r"<answer>(.{1,200}?)</answer>", text, re.DOTALL)
    if not answers:
        return 0.0

    # The last one: a model may try some while it thinks.
    try:
        found, used = evaluate(answers[-1])
    except ValueError:
        return 0.0

    # Compared with a tolerance, because a division makes a float.
    is_right = sorted(used) == sorted(numbers) and abs(found - target) < 1e-6

    # A tenth for the form, so that a model which solves nothing yet learns how an answer looks.
    return 1.0 if is_right else 0.1


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
