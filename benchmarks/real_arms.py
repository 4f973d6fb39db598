"""
The paper's comparison on a real model: SmolLM2-135M-Instruct on SVAMP, from a start as examples/smollm2 makes it.

    python examples/smollm2/prepare.py runs/smollm2 --data FOLDER; python examples/smollm2/warm_start.py runs/smollm2
    python benchmarks/real_arms.py                       runs the cells that have no file yet, one at a time
    python benchmarks/real_arms.py --table               puts the tables into docs/results.md

A cell trains one arm with one seed and scores all held-out problems with draws of that seed. QaRL TBPO at `g64` is the
example's recipe.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FOLDER = Path(__file__).resolve().parent / "results" / "real"
START = Path("runs/smollm2")
TIS = {
    "loss_type": "grpo",
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}
# IcePop (Ring-1T, arXiv 2510.18855): tokens whose ratio leaves [0.5, 5] do not count.
ICEPOP = {
    "loss_type": "grpo",
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_clip_max": 5.0,
}
NO_WEIGHT = {"vllm_importance_sampling_correction": False}
# Neighbours differ in one thing: the loss, its weight for the mismatch, or what the learner computes with.
ARMS: dict[str, dict[str, Any]] = {
    "bf16 GRPO": TIS | {"quant_scheme": "none"},
    "bf16 TBPO": {"quant_scheme": "none"},
    "rollout-only GRPO": TIS | {"quantize_learner": False},
    "rollout-only GRPO, no weight": {"loss_type": "grpo", "quantize_learner": False} | NO_WEIGHT,
    # TRL's own default: drops answers whose ratio, the product over their tokens, is above 3, and weighs the others by
    # it.
    "rollout-only GRPO, TRL default": {"loss_type": "grpo", "quantize_learner": False},
    "rollout-only GRPO, IcePop": ICEPOP | {"quantize_learner": False},
    "rollout-only TBPO": {"quantize_learner": False},
    "rollout-only TBPO, no weight": {"quantize_learner": False} | NO_WEIGHT,
    "QaRL GRPO": TIS,
    "QaRL TBPO": {},
    "QaRL GSPO": TIS | {"importance_sampling_level": "sequence"},
    # As a user with one GPU would train; the rate was not tuned.
    "QaRL TBPO, LoRA merged": {"lora_base": "merged", "learning_rate": 2e-4},
    "QaRL TBPO, LoRA beside a frozen base": {"lora_base": "frozen", "learning_rate": 2e-4},
}
RANK = 16  # of the adapters, on all quantized layers; lora_alpha is twice that
# Chosen on bf16 GRPO alone, before any other arm ran (dev/log.md).
G64: dict[str, Any] = {
    "quantization": {"quant_scheme": "W4A16", "quant_group_size": 64},
    "learning_rate": 2e-5,
    "prompts": 16,
    "answers": 8,
    "updates": 2,  # of a rollout batch
    "batches": 20,
    "band": 2e-3,  # epsilon_high, delta_low and delta_high are 4, 3 and 7 of these; the paper's is 1e-4
    "max_completion_length": 24,
    # Answers of a pass, so that two cells fit into 24 GB. Cells of `g64` whose settings lack it took 32: the same
    # sums, rounded otherwise.
    "micro": 16,
}
REGIMES: dict[str, dict[str, Any]] = {
    "g64": G64,
    "channel": G64 | {"quantization": {"quant_scheme": "W4A16", "quant_group_size": -1}},
    "fp8": G64 | {"quantization": {"quant_scheme": "FP8_DYNAMIC"}},
    "paper": G64 | {"band": 1e-4},
    # Four times as many updates of a rollout batch: where the toy's learner in bfloat16 fails. Chosen before any arm
    # ran in it.
    "stale": G64 | {"updates": 8},
}
BEFORE = "before training"
# What is compared, problem by problem: what changes, and the arms before and after the change. ", GPTQ" names that
# model of an arm.
PAIRS = (
    ("the learner's weights", "rollout-only GRPO", "QaRL GRPO"),
    ("the learner's weights, both by GPTQ", "rollout-only GRPO, GPTQ", "QaRL GRPO, GPTQ"),
    ("the learner's weights, no weight for the mismatch", "rollout-only GRPO, no weight", "QaRL GRPO"),
    ("the learner's weights, TBPO", "rollout-only TBPO", "QaRL TBPO"),
    ("the learner's weights, TBPO, both by GPTQ", "rollout-only TBPO, GPTQ", "QaRL TBPO, GPTQ"),
    ("the learner's weights, TBPO, no weight for the mismatch", "rollout-only TBPO, no weight", "QaRL TBPO"),
    ("the weight for the mismatch", "rollout-only GRPO, no weight", "rollout-only GRPO"),
    ("the weight for the mismatch, TBPO", "rollout-only TBPO, no weight", "rollout-only TBPO"),
    ("the learner's weights, TRL's default weight", "rollout-only GRPO, TRL default", "QaRL GRPO"),
    ("the weight: TRL's default, not TIS", "rollout-only GRPO", "rollout-only GRPO, TRL default"),
    ("the weight: IcePop, not TIS", "rollout-only GRPO", "rollout-only GRPO, IcePop"),
    ("the loss, and its weight", "QaRL GRPO", "QaRL TBPO"),
    ("the loss", "QaRL GSPO", "QaRL TBPO"),
    ("the loss, and its weight, learner in bfloat16", "rollout-only GRPO", "rollout-only TBPO"),
    ("the engine's weights", "bf16 GRPO", "rollout-only GRPO"),
    ("quantization after training, not during it", "QaRL GRPO", "bf16 GRPO"),
    ("quantization after training, TBPO", "QaRL TBPO", "bf16 TBPO"),
    ("GPTQ after training, not rounding", "bf16 GRPO", "bf16 GRPO, GPTQ"),
    ("GPTQ, TBPO", "bf16 TBPO", "bf16 TBPO, GPTQ"),
    ("GPTQ, rollouts in low bits", "rollout-only GRPO", "rollout-only GRPO, GPTQ"),
    ("GPTQ, rollouts in low bits, TBPO", "rollout-only TBPO", "rollout-only TBPO, GPTQ"),
    ("GPTQ, QaRL", "QaRL GRPO", "QaRL GRPO, GPTQ"),
    ("GPTQ, QaRL, TBPO", "QaRL TBPO", "QaRL TBPO, GPTQ"),
    ("GPTQ after rollout-only, not QaRL", "QaRL GRPO", "rollout-only GRPO, GPTQ"),
    ("GPTQ after rollout-only, not QaRL, TBPO", "QaRL TBPO", "rollout-only TBPO, GPTQ"),
    ("GPTQ after bf16, not QaRL", "QaRL GRPO", "bf16 GRPO, GPTQ"),
    ("GPTQ after bf16, not QaRL, TBPO", "QaRL TBPO", "bf16 TBPO, GPTQ"),
)
SAMPLES = 4  # of a held-out problem, at temperature 1
KEPT = (
    *("reward", "entropy", "grad_norm", "completions/mean_length", "completions/clipped_ratio", "step_time"),
    *(
        "mismatch/",
        "ratio/",
        "error_tokens/",
        "quant/",
        "clip_ratio/",
        "time/",
        "sampling/importance_sampling_ratio/",
        "sync/bytes",
    ),
)


# One cell ------------------------------------------------------------------------------------------------------------


def train(start: Path, regime: dict[str, Any], arm: dict[str, Any], seed: int, folder: Path) -> dict[str, list]:
    """
    Train; write `folder`/masters in bfloat16 (not of an adapter) and, for low-bit engines, `folder`/low_bit. Returns
    the log by column.
    """
    import common  # noqa: F401  # sets what torch and vLLM read when they load
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qarl_trl import QaRLConfig, QaRLTrainer
    from qarl_trl.rewards import math_reward

    updates, band, rows = regime["updates"], regime["band"], regime["prompts"] * regime["answers"]
    micro = min(regime["micro"], rows // updates)
    settings = {
        "output_dir": str(folder / "low_bit"),
        "use_vllm": True,
        "use_cpu": True,
        "bf16": True,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "vllm_max_model_length": 256,
        "vllm_engine_kwargs": {"enforce_eager": True},
        "max_completion_length": regime["max_completion_length"],
        "num_generations": regime["answers"],
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // updates // micro,
        "steps_per_generation": rows // micro,
        "max_steps": regime["batches"] * updates,
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
    if arm.get("quant_scheme") == "none":
        settings = {name: value for name, value in settings.items() if not name.startswith("quant_")}
    if "importance_sampling_level" in arm:  # Table 2: GSPO's bounds are delta_low and epsilon_high of TBPO
        arm = arm | {"epsilon": 3 * band, "epsilon_high": 4 * band}
    adapter = None
    if "lora_base" in arm:
        layers = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
        adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers)
        settings["model_init_kwargs"] = {"dtype": "bfloat16"}
    data = load_dataset("json", data_files=str(start / "train.jsonl"), split="train")
    data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})
    trainer = QaRLTrainer(
        str(start / "start"), math_reward, QaRLConfig(**settings | arm), train_dataset=data, peft_config=adapter
    )
    trainer.train()
    if "quant_scheme" not in arm:
        trainer.save_model()
    log = [row for row in trainer.state.log_history if "reward" in row]
    names = sorted({name for row in log for name in row if name.startswith(KEPT)})
    columns = {name: [_short(row.get(name)) for row in log] for name in names}
    if adapter is not None:
        return columns
    masters = AutoModelForCausalLM.from_pretrained(start / "start", dtype=torch.bfloat16)
    trained = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    for name, weight in masters.named_parameters():  # tied ones once
        weight.data.copy_(trained.pop(name))
    assert not trained, f"The trained model has weights that the start has not: {list(trained)}"
    masters.save_pretrained(folder / "masters")
    AutoTokenizer.from_pretrained(start / "start").save_pretrained(folder / "masters")
    return columns


def score(model: Path, regime: dict[str, Any], start: Path, seed: int, greedy: bool = False) -> list[int]:
    """Right answers of each held-out problem, of `SAMPLES` or of the greedy one."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "qarl_trl.cli", "eval", str(model), "--suite", str(start / "test.jsonl")]
        samples, temperature = (1, 0) if greedy else (SAMPLES, 1)
        command += ["--k", str(samples), "--temperature", str(temperature), "--seed", str(seed)]
        command += ["--max_new_tokens", str(regime["max_completion_length"]), "--output_dir", f"{scratch}/out"]
        subprocess.run(command, check=True)
        rows = Path(scratch, "out", "completions.jsonl").read_text().splitlines()
    return [int(sum(json.loads(row)["rewards"]["math_reward"])) for row in rows]


def run_cell(start: Path, regime: str, arm: str, seed: int) -> None:
    """Train (or, before training, take the start), score, write the file."""
    import common

    settings, chosen, log = REGIMES[regime], ARMS.get(arm, {}), {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if arm == BEFORE:
            (out / "masters").symlink_to((start / "start").resolve())
        else:
            with ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn")
            ) as process:  # its 9 GB go before GPTQ comes
                log = process.submit(train, start, settings, chosen, seed, out).result()
        models = ["low_bit"] if "lora_base" in chosen else ["masters", "low_bit"]
        if chosen.get("lora_base") == "merged":
            models = ["low_bit/low_bit"]
        if arm == BEFORE or "quant_scheme" in chosen:
            export(out / "masters", out / "low_bit", settings["quantization"])
        if "masters" in models and settings["quantization"]["quant_scheme"].startswith("W4"):
            gptq(out / "masters", out / "gptq", settings["quantization"], start)
            models.append("gptq")
        scores, greedy = (
            {Path(name).name: score(out / name, settings, start, seed, one) for name in models}
            for one in (False, True)
        )
    result = {
        "regime": regime,
        "arm": arm,
        "seed": seed,
        "settings": settings,
        "arm_settings": chosen,
        "scores": scores,
        "samples": SAMPLES,
        "greedy": greedy,  # cells of before 2026-11-25 lack it
        "log": log,
        "start_sha256": sha_of(start / "start" / "model.safetensors"),
        "machine": common.machine(),
    }
    path = file_of(regime, arm, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(result, separators=(",", ":")) + "\n")
    path.with_suffix(".part").rename(path)


def export(model: Path, folder: Path, quantization: dict[str, Any]) -> None:
    """Round to nearest: what a user does after training in bfloat16."""
    command = [sys.executable, "-m", "qarl_trl.cli", "export", str(model), str(folder)]
    command += ["--scheme", quantization["quant_scheme"]]
    if "quant_group_size" in quantization:
        command += ["--group_size", str(quantization["quant_group_size"])]
    subprocess.run(command, check=True)


def gptq(model: Path, folder: Path, quantization: dict[str, Any], start: Path) -> None:
    """llm-compressor's GPTQ, calibrated on the training problems with their solutions."""
    sys.path.insert(0, str(EXAMPLES / "smollm2"))  # before the quickstart, whose warm_start.py is another
    from warm_start import solution

    rows = [json.loads(line) for line in (start / "train.jsonl").read_text().splitlines()]
    calibration = folder.parent / "calibration.jsonl"
    chats = [
        [
            {"role": "user", "content": row["problem"]},
            {"role": "assistant", "content": solution(row["equation"])},
        ]
        for row in rows
    ]
    calibration.write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in chats))
    script = EXAMPLES / "llmcompressor" / "ptq.py"
    command = [sys.executable, str(script), "--model", str(model), "--output", str(folder), "--method", "gptq"]
    command += ["--scheme", quantization["quant_scheme"], "--group_size", str(quantization["quant_group_size"])]
    subprocess.run([*command, "--dataset", str(calibration), "--columns", "chat"], check=True)


# All cells -----------------------------------------------------------------------------------------------------------


def file_of(regime: str, arm: str, seed: int) -> Path:
    return FOLDER / regime / f"{arm.lower().replace(',', '').replace(' ', '_')}.{seed}.json"


def sha_of(weights: Path) -> str:
    """Which start a cell has."""
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:16]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def run_all(options: argparse.Namespace) -> None:
    """Run the cells without a file, `jobs` at a time, the first seed of all arms before the second."""
    wanted = [(r, a, s) for r in options.regime for s in options.seeds for a in options.arms]
    waiting, running = [cell for cell in wanted if not file_of(*cell).exists()], {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            cell = waiting.pop(0)
            regime, arm, seed = cell
            command = [sys.executable, __file__, "--start", str(options.start), "--regime", regime, "--arms", arm]
            name = f"real_{regime}_{arm.replace(' ', '_')}_{seed}.log"
            log = open(Path(tempfile.gettempdir(), name), "w")  # noqa: SIM115
            running[subprocess.Popen([*command, "--seeds", str(seed), "--one"], stdout=log, stderr=log)] = cell
        os.wait()
        for process in [process for process in running if process.poll() is not None]:
            print(*running.pop(process), "done" if process.returncode == 0 else "FAILED", flush=True)


# Tables --------------------------------------------------------------------------------------------------------------


def table(regime: str) -> str:
    """The arms of a regime, one a line, and which were not run."""
    header = ["arm", "seeds", "low bits, %", "bfloat16, %", "reward", "mismatch, nats"]
    lines = [header, ["---"] * len(header)]
    for arm in (BEFORE, *ARMS):
        cells = cells_of(regime, arm)
        if not cells:
            continue
        lines.append([arm, str(len(cells)), *(percent(cells, name) for name in ("low_bit", "masters"))])
        lines[-1] += [mean(cells, "reward", "{:.2f}", 4), mean(cells, "mismatch/logp_diff_mean", "{:.2g}")]
        if rounded := [cell for cell in cells if "gptq" in cell["scores"]]:
            lines.append(["the same, GPTQ", str(len(rounded)), percent(rounded, "gptq"), "-", "-", "-"])
    missing = [arm for arm in (BEFORE, *ARMS) if not cells_of(regime, arm)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return text + (f"\n\nNot run: {'; '.join(missing)}." if missing else "")


def greedy_table(regime: str) -> str:
    """
    The cells with greedy answers, in percent: those, the mean of the answers at temperature 1, and problems with any
    right one.
    """
    models = ("low_bit", "gptq", "masters")
    lines = [["arm", "seed", "greedy: low bits, GPTQ, bfloat16", "mean of four", "any of the four"], ["---"] * 5]
    for cell in (cell for arm in (BEFORE, *ARMS) for cell in cells_of(regime, arm) if "greedy" in cell):
        lines.append([cell["arm"], str(cell["seed"])])
        for key, share in (("greedy", float), ("scores", lambda right: right / SAMPLES), ("scores", bool)):
            scored = [map(share, cell[key][name]) for name in models if name in cell[key]]
            lines[-1].append(", ".join(f"{100 * statistics.fmean(problems):.1f}" for problems in scored))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells_of(regime: str, arm: str) -> list[dict[str, Any]]:
    """The cells of a row that were run, by seed."""
    return [json.loads(path.read_text()) for seed in range(100) if (path := file_of(regime, arm, seed)).exists()]


def percent(cells: list[dict[str, Any]], model: str) -> str:
    found = [cell for cell in cells if model in cell["scores"]]
    return "{:.1f} ± {:.1f}".format(*accuracy(found, model)) if found else "-"


def accuracy(cells: list[dict[str, Any]], model: str) -> tuple[float, float]:
    """
    Percent of held-out answers that are right, and its standard error.

    It holds the choice of the held-out problems (the spread of the problems' means) and, of several seeds, that of
    training and sampling (the spread of the seeds' means). The first contains part of the second: the error is rather
    too large.
    """
    return _mean_and_error([_shares(cell, model) for cell in cells])


def differences(regime: str) -> str:
    """What each change in `PAIRS` moves, in points; the seeds that both arms have."""
    lines = [["what changes", "from", "to", "seeds", "low bits", "bfloat16"], ["---"] * 6]
    for what, *names in PAIRS:
        arms = [name.removesuffix(", GPTQ") for name in names]
        cells = [{cell["seed"]: cell for cell in cells_of(regime, arm)} for arm in arms]
        for place in (place for place, name in enumerate(names) if name.endswith(", GPTQ")):
            cells[place] = {seed: cell for seed, cell in cells[place].items() if "gptq" in cell["scores"]}
        seeds = sorted(set(cells[0]) & set(cells[1]))
        for seed in seeds:
            starts = {by_seed[seed]["start_sha256"] for by_seed in cells}
            if len(starts) > 1:
                raise ValueError(f"{regime}, seed {seed}: {' and '.join(arms)} must have one start, got {starts}.")
        if seeds:
            lines.append([what, *names, str(len(seeds))])
            lines[-1] += [difference([[c[s] for c in cells] for s in seeds], names, m) for m in ("low_bit", "masters")]
    if len(lines) == 2:
        return "No two arms were run that can be compared."
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def difference(pairs: Any, names: list[str], model: str) -> str:
    """Points from the first to the second cell of each pair, with the standard error, paired by problem."""
    models = ["gptq" if name.endswith(", GPTQ") else model for name in names]
    if "gptq" in models and model != "low_bit":
        return "-"
    both = [[_shares(cell, name) for cell, name in zip(pair, models, strict=True)] for pair in pairs]
    return "{:+.1f} ± {:.1f}".format(*_mean_and_error([[y - x for x, y in zip(*two, strict=True)] for two in both]))


def _shares(cell: dict[str, Any], model: str) -> list[float]:
    return [100 * right / cell["samples"] for right in cell["scores"][model]]


def _mean_and_error(shares: list[list[float]]) -> tuple[float, float]:
    problems = [statistics.fmean(values) for values in zip(*shares, strict=True)]
    seeds = list(map(statistics.fmean, shares))
    variance = statistics.variance(problems) / len(problems)
    if len(seeds) > 1:
        variance += statistics.variance(seeds) / len(seeds)
    return statistics.fmean(seeds), variance**0.5


def mean(cells: list[dict[str, Any]], name: str, form: str, last: int = 0) -> str:
    """Mean over the cells and their rollout batches, or the `last` of these."""
    values = [value for cell in cells for value in cell["log"].get(name, [])[-last:] if value is not None]
    return form.format(statistics.fmean(values)) if values else "-"


def tables(regime: str) -> dict[str, str]:
    """The tables of a regime by their marks in the page; that of greedy answers only where some were scored."""
    made = {"real": table(regime), "real differences": differences(regime)}
    if any("greedy" in cell for arm in (BEFORE, *ARMS) for cell in cells_of(regime, arm)):
        made["real greedy"] = greedy_table(regime)
    return {f"<!-- {name}: {regime} -->\n": text for name, text in made.items()}


def put_tables(page: Path) -> None:
    """Write the tables between their marks, as `<!-- real: g64 -->` and `<!-- end -->`."""
    text = page.read_text()
    for regime in filter(lambda name: (FOLDER / name).exists(), REGIMES):
        for mark, lines in tables(regime).items():
            before, after = text.split(mark)
            text = f"{before}{mark}{lines}\n<!-- end -->{after.split('<!-- end -->', 1)[1]}"
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, default=START, help="folder with start/, train.jsonl and test.jsonl")
    parser.add_argument("--regime", nargs="+", choices=REGIMES, default=["g64"])
    parser.add_argument("--arms", nargs="+", choices=(BEFORE, *ARMS), default=[BEFORE, *ARMS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time (default: 1)")
    parser.add_argument("--one", action="store_true", help="the first cell, in this process")
    parser.add_argument("--table", action="store_true", help="put the tables into docs/results.md and run nothing")
    options = parser.parse_args()
    if options.table:
        put_tables(FOLDER.parents[2] / "docs" / "results.md")
    elif options.one:
        run_cell(options.start, options.regime[0], options.arms[0], options.seeds[0])
    else:
        run_all(options)


if __name__ == "__main__":
    main()
