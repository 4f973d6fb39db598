"""`qarl-trl plan --gpu`: the arms side by side, what each cannot do, and the fit to a run that was measured."""

import json
import re
from pathlib import Path

import pytest

from qarl_trl.cli import main
from qarl_trl.tools.plan.gpus import GPUS
from qarl_trl.tools.plan.memory.engine import engine_bytes, synced_bytes
from qarl_trl.tools.plan.memory.moments import fits
from qarl_trl.tools.plan.run import Hardware
from qarl_trl.tools.plan.seconds.arms import compare
from qarl_trl.tools.plan.seconds.measured import Measured
from qarl_trl.tools.plan.seconds.parts import NO_FIT, Parts


RECIPES = Path(__file__).parents[4] / "recipes"
ONE_GPU = RECIPES / "one_gpu"
LARGE = RECIPES / "qwen3-30b-a3b-base" / "w4a16_qarl_tbpo.yaml"
SMALL = ONE_GPU / "qwen2.5-1.5b.yaml"


def plan(capsys, *argv):
    """The exit code of `qarl-trl plan`, and what it printed."""
    code = 0
    try:
        main(["plan", *map(str, argv)])
    except SystemExit as stopped:
        code = stopped.code
    return code, capsys.readouterr()


def arms_of(path, gpu, *argv, gpus=1, memory=None, **changes):
    """The comparison of a recipe on a GPU."""
    gib = GPUS[gpu].memory if memory is None else memory
    return compare(["--config", str(path), *map(str, argv)], Hardware(gpus, gib), GPUS[gpu], **changes)


def speeds(comparison):
    """How often each arm is as fast as bf16."""
    base = comparison.arms["bf16"].seconds.sum
    faster = {}
    for name, arm in comparison.arms.items():
        # An arm that cannot run has no seconds.
        if arm.seconds is not None:
            faster[name] = base / arm.seconds.sum
    return faster


# Arms ---------------------------------------------------------------------------------------------------------------


def test_the_arms_of_a_recipe_differ_in_bits_alone():
    comparison = arms_of(SMALL, "a100", "--quant_scheme", "W4A16")

    runs = {name: arm.run for name, arm in comparison.arms.items()}
    assert [*runs] == ["bf16", "rollout-only W4A16", "QaRL W4A16", "QaRL FP8_DYNAMIC"]
    assert [run.low_bit_forward for run in runs.values()] == [False, False, True, True]

    # 16, 8 and 4 bits. The learner's bits change nothing in the engine.
    bf16, rollout_only, qarl, fp8 = map(engine_bytes, runs.values())
    assert bf16 > fp8 > rollout_only == qarl


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--quant_scheme", "none", "--loss_type", "grpo"], ["rollout-only W4A16", "QaRL W4A16", "QaRL FP8_DYNAMIC"]),
        (["--quant_scheme", "FP8_DYNAMIC"], ["rollout-only FP8_DYNAMIC", "QaRL FP8_DYNAMIC", "QaRL W4A16"]),
        (["--quantize_learner", "false"], ["rollout-only W4A16", "QaRL W4A16", "QaRL FP8_DYNAMIC"]),
    ],
)
def test_any_of_the_arms_may_be_the_recipe(argv, expected):
    comparison = arms_of(SMALL, "h100", *argv)

    assert [*comparison.arms] == ["bf16", *expected]
    for name, arm in comparison.arms.items():
        assert arm.seconds is not None, name


def test_ampere_has_no_float8():
    arm = arms_of(SMALL, "a100").arms["QaRL FP8_DYNAMIC"]

    assert arm.seconds is None
    assert arm.note == "FP8_DYNAMIC needs Ada or Hopper or Blackwell"
    # Control: Ada has it.
    assert arms_of(SMALL, "l4").arms["QaRL FP8_DYNAMIC"].seconds is not None


def test_a_recipe_of_llm_compressor_has_a_bf16_arm_too(capsys):
    """Its keys exclude a scheme, and a command line cannot unset one."""
    mixed = RECIPES / "llmcompressor" / "fp8_attention_w4a16_mlp.yaml"
    options = ("--quant_recipe", mixed)
    arms = arms_of(ONE_GPU / "qwen3-8b.yaml", "h100", *options).arms
    by_scheme = arms_of(ONE_GPU / "qwen3-8b.yaml", "h100").arms

    assert [*arms] == ["bf16", f"rollout-only {mixed.name}", f"QaRL {mixed.name}", "QaRL FP8_DYNAMIC"]
    for name in ("bf16", "QaRL FP8_DYNAMIC"):
        assert arms[name].seconds == by_scheme[name].seconds
    in_float8 = engine_bytes(by_scheme["QaRL FP8_DYNAMIC"].run)
    assert engine_bytes(by_scheme["QaRL W4A16"].run) < engine_bytes(arms[f"QaRL {mixed.name}"].run) < in_float8

    # The columns stand under their names, though a file has a longer one.
    _, printed = plan(capsys, "--config", ONE_GPU / "qwen3-8b.yaml", "--gpu", "h100", *options)
    lines = printed.out.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("arm "))
    sums = [line.index(f"{arm.seconds.sum:.1f}") for line, arm in zip(lines[begin + 1 :], arms.values(), strict=False)]
    ends = {at + len(f"{arm.seconds.sum:.1f}") for at, arm in zip(sums, arms.values(), strict=True)}
    assert ends == {lines[begin].index("sum") + 3}


def test_a_group_size_is_of_the_recipes_scheme_alone():
    arms = arms_of(SMALL, "h100", "--quant_group_size", 64).arms
    usual = arms_of(SMALL, "h100").arms

    assert engine_bytes(arms["QaRL W4A16"].run) > engine_bytes(usual["QaRL W4A16"].run)
    for name in ("bf16", "QaRL FP8_DYNAMIC"):
        assert arms[name].seconds == usual[name].seconds


def test_what_bf16_cannot_do_is_said(capsys):
    """A base of 7B in bfloat16 is larger than a card of 24 GB; in 4 bits it fits."""
    _, printed = plan(capsys, "--config", ONE_GPU / "qwen2.5-7b_frozen.yaml", "--gpu", "4090")

    lines = printed.out.splitlines()
    assert "bf16: needs 36.3 of 23.5 GiB, the cache does not hold one sequence" in lines
    assert re.search(r"^QaRL W4A16.*no bf16 beside it", printed.out, re.MULTILINE)
    assert re.search(r"^ *bf16 +cannot run *$", printed.out, re.MULTILINE)

    _, printed = plan(capsys, "--config", ONE_GPU / "qwen3-8b.yaml", "--gpu", "4090")
    assert "vllm_gpu_memory_utilization: none would fit" in printed.out


def test_an_arm_that_fits_with_another_share_is_shown_with_it():
    """30B on GPUs of 80 GB, whose engine share is for 4 bits."""
    one_row = ("--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 64, "--steps_per_generation", 512)
    arms = arms_of(LARGE, "h100", *one_row, gpus=8).arms

    assert "the cache does not hold one sequence; shown with --vllm_gpu_memory_utilization" in arms["bf16"].note
    assert fits(arms["bf16"].run)
    assert not arms["QaRL W4A16"].note


def test_fewer_bits_leave_more_room_for_sequences():
    # Answers so long that the cache, not the 512 answers of the batch, is the limit of each arm.
    arms = arms_of(ONE_GPU / "qwen3-8b.yaml", "h100", answer_tokens=4000).arms

    assert arms["bf16"].at_once < arms["QaRL FP8_DYNAMIC"].at_once < arms["QaRL W4A16"].at_once < 512


# Published ----------------------------------------------------------------------------------------------------------


def test_the_papers_speed():
    """
    1.4 times as fast with a quantized rollout, QaRL 1.3. On 8 H800: the memory and the products of an H100.

    The paper does not say how long answers are or how much memory a cache has. Here they have 4,000 tokens, and each
    engine the 112 GiB of two shares of the recipe for 141 GB. Of answers so long the rollout-only arm fits; of the
    longest, which `plan` counts, it would need 139.3 GiB.
    """
    comparison = arms_of(LARGE, "h100", gpus=8, memory=140, prompt_tokens=300, answer_tokens=4000)
    speed = speeds(comparison)

    assert speed["rollout-only W4A16"] == pytest.approx(1.4, rel=0.1)
    assert speed["QaRL W4A16"] == pytest.approx(1.3, rel=0.1)
    assert speed["QaRL W4A16"] < speed["rollout-only W4A16"]


@pytest.mark.parametrize(
    ("recipe", "low", "high"),
    [(RECIPES / "qwen3-8b-base" / "w4a16_qarl_tbpo.yaml", 1.12, 1.18), (LARGE, 1.35, 1.5)],
)
def test_the_float8_rollouts_of_verl(recipe, low, high):
    """12 to 18 % for a dense 8B, more than 35 % for 30B-A3B. Its experts have CUDA graphs."""
    graphs = ("--vllm_engine_kwargs", '{"enforce_eager": false}')
    comparison = arms_of(recipe, "h100", *graphs, gpus=8, memory=139, prompt_tokens=300, answer_tokens=4000)
    arms = comparison.arms

    speed = arms["bf16"].seconds.rollout / arms["QaRL FP8_DYNAMIC"].seconds.rollout
    assert low * 0.95 < speed < high * 1.05


# No GPU is assumed --------------------------------------------------------------------------------------------------


def test_without_a_gpu_there_are_no_seconds_and_each_gpu_has_a_line(capsys):
    code, printed = plan(capsys, "--config", SMALL)

    assert code == 0
    # "Seconds" as well.
    assert "econds" not in printed.out
    rows = {line.split()[0]: line for line in printed.out.splitlines()}
    # As the recipe's header says.
    assert rows["4090"].split()[1:3] == ["23.5", "19.8"]
    assert set(GPUS) < set(rows)


def test_a_run_that_fits_no_gpu_of_the_list_is_an_error(capsys):
    # 30 billion float32 master weights are 120 GB on one GPU, before any gradient.
    code, printed = plan(capsys, "--config", LARGE, "--vllm_tensor_parallel_size", 1)

    assert code == 1
    assert printed.out.count("does not fit") == len(GPUS)


def test_memory_alone_has_a_verdict_and_no_seconds(capsys):
    code, printed = plan(capsys, "--config", SMALL, "--memory", 23.5)

    assert code == 0
    assert "No seconds: name a GPU with --gpu." in printed.out
    assert printed.out.endswith("It fits: 19.8 GiB of 23.5, 7 of them assumed.\n")


def test_what_is_assumed_is_marked(capsys):
    _, printed = plan(capsys, "--config", SMALL, "--gpu", "4090")
    assert "512 answers of 512 tokens (assumed), prompts of 200 (assumed), updates: 8" in printed.out
    assert "No run was measured on this GPU" in printed.out

    # Control: with both lengths given, on the GPU of the measurements, nothing is.
    options = ("--prompt_tokens", 90, "--answer_tokens", 700)
    _, printed = plan(capsys, "--config", SMALL, "--gpu", "h200", *options)
    assert "512 answers of 700 tokens, prompts of 90, updates: 8" in printed.out
    assert "No run was measured" not in printed.out


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--from", "runs/mine"], "--gpu"),
        (["--gpu", "l4", "--answer_tokens", "nan"], "--answer_tokens"),
        (["--gpu", "l4", "--prompt_tokens", "0"], "--prompt_tokens"),
        (["--gpu", "l4", "--from", "runs/mine", "--answer_tokens", "5"], "--answer_tokens"),
        (["--gpu", "l4", "--from", "nowhere"], "nowhere is not a run"),
    ],
)
def test_a_wrong_option_is_one_line(capsys, argv, field):
    code, printed = plan(capsys, "--config", SMALL, *argv)

    assert code == 2
    assert field in printed.err
    assert len(printed.err.strip().splitlines()) == 1


# Fitted to a run ----------------------------------------------------------------------------------------------------


def log_of(steps, updates=8, rollout=40.0, sync=2.0, update=24.0, **values):
    """A log whose first rollout batch is ten times as slow; `update` is of an optimizer step."""
    rows = []
    for step in range(1, steps + 1):
        # Kernels compile in the first rollout batch. A mean with it would not be 40 s.
        slow = 10 if step <= updates else 1
        samples = step % updates == 1
        row = {"step": step, "time/update": slow * update, "completions/mean_length": 600.0}
        row["time/rollout"] = slow * rollout if samples else 0.0
        row["time/sync"] = slow * sync if samples else 0.0
        rows.append(row | values)
    return rows


def save(folder, rows):
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    return folder


def test_a_measured_rollout_batch_is_the_mean_without_the_first():
    run = Measured.from_log(log_of(24), updates=8)

    assert run.seconds.rollout == pytest.approx(40.0)
    assert run.seconds.sync == pytest.approx(2.0)
    assert run.seconds.update == pytest.approx(8 * 24.0)
    assert run.answer_tokens == 600

    with pytest.raises(ValueError, match="after step 8"):
        Measured.from_log(log_of(8), updates=8)
    with pytest.raises(ValueError, match="with an engine"):
        Measured.from_log(log_of(16, rollout=0.0), updates=8)


@pytest.mark.parametrize("last", [17, 20, 31, 32, 41])
def test_a_batch_that_a_log_has_in_part_is_left_out(last):
    """It would have its rollout, and the mean over steps not all of its updates."""
    run = Measured.from_log(log_of(last), updates=8)

    assert run.seconds.rollout == pytest.approx(40.0)
    assert run.seconds.sync == pytest.approx(2.0)
    with pytest.raises(ValueError, match="a whole rollout batch after step 8"):
        Measured.from_log(log_of(15), updates=8)


def test_a_line_that_has_the_first_rollout_batch_among_others_is_left_out():
    """With TRL's default of 10 steps a line, kernels that compiled in the first 8 were a part of the mean."""
    lines = []
    rows = log_of(80)
    for end in range(10, 81, 10):
        line = {"step": end}
        for name in ("time/rollout", "time/sync", "time/update", "completions/mean_length"):
            values = [row[name] for row in rows[end - 10 : end]]
            line[name] = sum(values) / len(values)
        lines.append(line)
    # Other lines are none of the steps.
    lines.insert(3, {"step": 30, "eval_loss": 1.0})

    run = Measured.from_log(lines, updates=8)

    assert run.seconds.update == pytest.approx(8 * 24.0)
    with pytest.raises(ValueError, match="after step 8"):
        Measured.from_log(lines[:1], updates=8)


def test_a_fitted_estimate_of_the_run_itself_is_what_was_measured(tmp_path):
    folder = save(tmp_path, log_of(24))
    plain = arms_of(SMALL, "4090", answer_tokens=600)
    fitted = arms_of(SMALL, "4090", measured_run=folder)

    assert plain.factors == NO_FIT
    assert fitted.arms["QaRL W4A16"].seconds.rollout == pytest.approx(40.0)
    assert fitted.arms["QaRL W4A16"].seconds.update == pytest.approx(8 * 24.0)

    # The other arms get the same factors. Nobody measured them: they are other kernels, whose estimates are assumed to
    # be wrong by as much.
    for name, arm in fitted.arms.items():
        of_factors = plain.arms[name].seconds * fitted.factors
        assert arm.seconds.sum == pytest.approx(of_factors.sum)
    # Control: there was something to fit.
    assert fitted.factors.update != pytest.approx(1, rel=0.05)


def test_a_run_of_another_scheme_is_refused(tmp_path):
    of_4_bits = synced_bytes(arms_of(SMALL, "4090").arms["QaRL W4A16"].run)
    folder = save(tmp_path, log_of(24, **{"sync/bytes": float(of_4_bits)}))

    # Control: the same log is accepted for its own scheme.
    arms_of(SMALL, "4090", measured_run=folder)
    with pytest.raises(ValueError, match="must be a run of this recipe"):
        arms_of(SMALL, "4090", "--quant_scheme", "FP8_DYNAMIC", measured_run=folder)


def test_the_fit_is_said(tmp_path, capsys):
    _, printed = plan(capsys, "--config", SMALL, "--gpu", "4090", "--from", save(tmp_path, log_of(24)))

    assert "512 answers of 600 tokens, prompts of 200 (assumed)" in printed.out
    assert "Fitted to a run: rollout 40.0 s, sync 2.00, update 192.0 were measured" in printed.out
    assert "only that run was measured" in printed.out


def test_parts_multiply():
    assert Parts(1, 2, 3) * Parts(4, 5, 6) == Parts(4, 10, 18)
    assert Parts(1, 2, 3).sum == 6
