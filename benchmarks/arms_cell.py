"""One cell of the comparison of arms: a toy that adds step by step, trained by one arm with one seed (see arms.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import common  # sets what torch and vLLM read when they load
import portable_engine
import torch
import vllm  # noqa: F401  # here, so that cells that are forked have it
from arms import DRAWS, STOCK, WEIGHTS, distilled_file_of, sha_of
from arms_task import HELD_OUT, add_outliers, kept_by_kpop, numbers_of, problems
from datasets import Dataset, disable_progress_bars
from safetensors.torch import load_model
from sums import correct, make_tokenizer
from transformers import PrinterCallback, ProgressCallback, Qwen3ForCausalLM
from transformers.utils import logging

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.tools.evaluate.sample import prompt_seed


# Of a rollout batch: 128 completions.
PROMPTS = 16
ANSWERS = 8
TRAINING = 4096  # problems
# As in the paper's Table 2.
TEMPERATURE = 0.6
# By which a process finds a process group.
GROUP = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
MACHINE = common.machine()  # when this was loaded: cells are forked later
# How the names of the logged columns begin that a cell keeps.
KEPT = (
    "reward",
    "entropy",
    "grad_norm",
    "completions/mean_length",
    "completions/clipped_ratio",
    "mismatch/",
    "ratio/",
    "error_tokens/",
    "quant/",
    "clip_ratio/",
    "sampling/importance_sampling_ratio/",
)


def run(base: Path, arm: dict[str, Any], regime: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """
    Train and evaluate one cell.

    Args:
        base: Folder of the warm start.
        arm: Settings of the arm, with the bounds of the regime.
        regime: An entry of `arms.REGIMES`.
        seed: Of the training problems and of the trainer.
        folder: Gets what is written on the way.

    Returns:
        What goes to the cell's JSON file.
    """
    start = time.perf_counter()
    logging.disable_progress_bar()
    disable_progress_bars()
    is_portable = regime.get("portable", False)
    if is_portable:
        portable_engine.install()

    trainer = make_trainer(base, arm, regime, seed, folder)
    held_out = list(islice(problems(1, held_out=True, count=numbers_of(regime)), HELD_OUT))

    before = None
    if seed == 0:
        # The same for all seeds.
        before = accuracy(trainer, held_out)
    trainer.train()
    after = accuracy(trainer, held_out)

    # Cells of the older regimes are scored by the engine; what rollout-only arms trained there is a bfloat16 model,
    # which is scored, too.
    scores = None
    of_learner = None
    if is_portable:
        scores = scores_of(trainer, arm, regime, folder)
    elif not arm.get("quantize_learner", True):
        of_learner = learner_accuracy(trainer, held_out)

    return {
        "accuracy_before": before,
        "accuracy_after": after,
        "accuracy_learner": of_learner,
        "scores": scores,
        "log": common.logged_columns(trainer.state.log_history, KEPT),
        "draws": DRAWS,
        "base_sha256": sha_of(base / WEIGHTS),
        "distilled_sha256": sha_of(distilled_file_of(regime)) if starts_distilled(arm, regime) else None,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "machine": MACHINE,
    }


# Training ------------------------------------------------------------------------------------------------------------


class KPopTrainer(QaRLTrainer):
    """The mask of KPop on TRL's weight for the mismatch."""

    def __init__(self, threshold: float, **settings: Any) -> None:
        self._threshold = threshold
        super().__init__(**settings)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        kept = kept_by_kpop(output["old_per_token_logps"], output["sampling_per_token_logps"], self._threshold)
        output["importance_sampling_ratio"] = output["importance_sampling_ratio"] * kept
        return output


def make_trainer(base: Path, arm: dict[str, Any], regime: dict[str, Any], seed: int, folder: Path) -> QaRLTrainer:
    """The trainer of a cell. `folder` gets its start: the model of `base` with the outlier channels of the regime."""
    source = folder / "start"
    model = Qwen3ForCausalLM.from_pretrained(base)
    if starts_distilled(arm, regime):
        # Its weights have the outlier channels.
        load_model(model, distilled_file_of(regime))
    else:
        add_outliers(model, **regime["outliers"])
    model.save_pretrained(source)
    make_tokenizer().save_pretrained(source)

    make: Any = QaRLTrainer
    if "kpop" in arm:
        make = partial(KPopTrainer, arm["kpop"])
    training_problems = islice(problems(seed + 2, count=numbers_of(regime)), TRAINING)
    trainer = make(
        model=str(source),
        reward_funcs=correct,
        args=QaRLConfig(**settings_of(arm, regime, seed, folder)),
        train_dataset=Dataset.from_list(list(training_problems)),
    )

    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def starts_distilled(arm: dict[str, Any], regime: dict[str, Any]) -> bool:
    """Whether a cell begins with the distilled start: that of an arm in bfloat16 is never distilled."""
    return "distilled" in regime and arm.get("quant_scheme") != "none"


def settings_of(arm: dict[str, Any], regime: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """The arguments of `QaRLConfig`."""
    updates = regime["updates"]
    band = regime["band"]
    settings = {
        "output_dir": str(folder),
        "use_vllm": True,
        "use_cpu": True,
        "vllm_max_model_length": regime["model"]["max_position_embeddings"],
        "vllm_engine_kwargs": {"enforce_eager": True},
        "max_completion_length": regime["max_completion_length"],
        "num_generations": ANSWERS,
        "per_device_train_batch_size": PROMPTS * ANSWERS // updates,
        "steps_per_generation": updates,
        "max_steps": regime["rollouts"] * updates,
        "learning_rate": regime["learning_rate"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": updates,
        "tbpo_epsilon_high": 4 * band,
        "tbpo_delta_low": 3 * band,
        "tbpo_delta_high": 7 * band,
        "logging_steps": updates,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": seed,
        **regime["quantization"],
    }
    if regime.get("portable"):
        settings |= {"bf16": False, **STOCK}

    # An arm in bfloat16 has no low bits to set.
    if arm.get("quant_scheme") == "none":
        settings = {name: value for name, value in settings.items() if not name.startswith("quant_")}
    of_arm = {name: value for name, value in arm.items() if name != "kpop"}
    return settings | of_arm


# Scores --------------------------------------------------------------------------------------------------------------


def accuracy(trainer: QaRLTrainer, held_out: list[dict[str, Any]]) -> float:
    """Share of right answers of the training engine with the learner's current weights."""
    from vllm import SamplingParams

    trainer.vllm_generation.sync_weights()
    prompts = [row["prompt"] for row in held_out]
    params = []
    for prompt in prompts:
        # One seed for all prompts would give every answer the same random numbers.
        seed = prompt_seed(trainer.processing_class.encode(prompt), 0)
        length = trainer.args.max_completion_length
        params.append(SamplingParams(temperature=TEMPERATURE, max_tokens=length, seed=seed))

    outputs = trainer.vllm_generation.llm.generate(prompts, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    rewards = correct(texts, [row["answer"] for row in held_out])
    return sum(rewards) / len(rewards)


def learner_accuracy(trainer: QaRLTrainer, held_out: list[dict[str, Any]]) -> float:
    """The same of the learner itself, in bfloat16, by transformers' `generate`."""
    tokenizer = trainer.processing_class
    model = trainer.model.eval()
    # Prompts have one length.
    ids = torch.tensor([tokenizer.encode(row["prompt"]) for row in held_out])
    length = trainer.args.max_completion_length

    torch.manual_seed(0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        answers = model.generate(ids, do_sample=True, temperature=TEMPERATURE, top_k=0, max_new_tokens=length)
    texts = tokenizer.batch_decode(answers[:, ids.shape[1] :], skip_special_tokens=True)
    rewards = correct(texts, [row["answer"] for row in held_out])
    return sum(rewards) / len(rewards)


def scores_of(trainer: QaRLTrainer, arm: dict[str, Any], regime: dict[str, Any], folder: Path) -> dict[str, float]:
    """The scores of the trained master weights, as they are and in 4 bits."""
    # `save_model` would write the low-bit weights.
    masters = folder / "masters"
    model = Qwen3ForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    trained = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(trained[name])
    model.save_pretrained(masters)

    ways = ["rounded", "gptq"]
    if "distilled" in regime:
        ways.append("distilled")
    elif arm.get("quant_scheme") == "none":
        ways.append("awq")
    script = Path(__file__).with_name("arms_scores.py")
    command = [sys.executable, str(script), str(masters), json.dumps(regime), *ways]
    # Another process, without the engine's process group, by which llm-compressor's AWQ would reduce.
    environment = {name: value for name, value in os.environ.items() if name not in GROUP}
    said = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout
    return json.loads(said.splitlines()[-1])
