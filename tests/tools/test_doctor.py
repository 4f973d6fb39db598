"""`qarl-trl doctor` without an engine: what it finds, what it says where it cannot look, and its exit codes."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import make_model, make_tokenizer
from datasets import Dataset
from lines import additions, write_rows

from qarl_trl import QaRLConfig, cli
from qarl_trl._compat import versions
from qarl_trl.boxes import last_boxes
from qarl_trl.quant.layers.layer import quantized_modules
from qarl_trl.quant.supported import SUPPORTED
from qarl_trl.rewards import math_reward
from qarl_trl.rollout import cpu_support
from qarl_trl.tools.doctor import FAIL, OK, SKIPPED, WARN, CheckResult, judge, machine, measure, rewards, room
from qarl_trl.tools.plan.run import GIB


RULE = Path(judge.__file__).with_name("rule.json")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_model(num_hidden_layers=1).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")

    write_rows(folder / "sums.jsonl", additions(9))

    (folder / "recipe.yaml").write_text(
        f"model_name_or_path: {folder}/model\n"
        f"dataset_name_or_path: {folder}/sums.jsonl\n"
        f"output_dir: {folder}/out\n"
        "max_completion_length: 8\n"
        "conversational: false\n"
        "report_to: none\n"
    )
    return str(folder / "recipe.yaml")


@pytest.fixture(autouse=True)
def cache_of_this_test(tmp_path, monkeypatch):
    # The user's cache may hold what an earlier run made of the data, or may not be writable.
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def run_doctor(capsys, *argv):
    """The exit code, the status of each check by its name, and what was printed."""
    exit_code = 0
    try:
        cli.main(["doctor", *argv])
    except SystemExit as stopped:
        exit_code = stopped.code
    printed = capsys.readouterr()

    statuses = {}
    # A result is one line: two spaces, the status, the name in 20 columns, the text.
    for match in re.finditer(r"^  (ok|warn|FAIL|-) +(.{20})", printed.out, re.MULTILINE):
        statuses[match[2].strip()] = match[1]
    return exit_code, statuses, printed


def test_without_a_recipe_it_says_how_to_check_a_run(recipe, capsys):
    _, _, printed = run_doctor(capsys)

    assert printed.out.splitlines()[-1].endswith("qarl-trl doctor --config recipe.yaml")
    # Control: where a run was checked it does not.
    assert "Only the machine" not in run_doctor(capsys, "--config", recipe)[2].out


# A run ---------------------------------------------------------------------------------------------------------------


def test_every_section_of_a_run_reports_its_results_a_line_each(recipe, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    exit_code, statuses, printed = run_doctor(capsys, "--config", recipe)

    assert exit_code == 0
    # Users paste this output into issues.
    assert "hf_secret" not in printed.out
    # Warnings are about this machine, whatever it is.
    for name in ("versions", "math_reward", "settings"):
        assert statuses[name] in (OK, WARN)
    assert "right answers 1.00, wrong ones 0.00; told apart in 9 of 9 rows" in printed.out
    # The recipe has no engine, so there is nothing to measure.
    assert statuses["mismatch"] == SKIPPED
    assert "use_vllm: false" in printed.out


def test_a_section_that_cannot_be_run_says_why_and_does_not_fail_the_rest(recipe, capsys):
    # The doctor downloads nothing, so this model is nowhere.
    argv = ["--config", recipe, "--model_name_or_path", "no/such-model", "--use_vllm"]

    _, statuses, printed = run_doctor(capsys, *argv)

    assert statuses["model"] == SKIPPED
    assert statuses["mismatch"] == SKIPPED
    assert "9 of 9 rows" in printed.out


@pytest.mark.parametrize(
    ("options", "expected_code", "word"),
    [
        # A rollout batch of 8 rows x 16 steps, with 8 completions of each prompt.
        (["--steps_per_generation", "16"], 1, "at least 16 prompts, got 9"),
        (["--num_iterations", "0"], 2, "num_iterations"),
        # The CPU engine has no kernel for it.
        (["--quant_scheme", "W8A16", "--use_vllm", "--probe_prompts", "0"], 1, "W8A16"),
        (["--no_such_key", "1"], 2, "no_such_key"),
        (["--reward_weights", "1", "2"], 1, "reward_weights must be one number for each of 1 reward_funcs"),
    ],
)
def test_what_would_fail_or_train_nothing_is_found(recipe, capsys, options, expected_code, word):
    exit_code, _, printed = run_doctor(capsys, "--config", recipe, *options)

    assert exit_code == expected_code
    assert word in printed.out + printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("gpu", "options", "expected_code", "words"),
    [
        ("l4", [], 0, ["W4A16 runs on Ampere or Ada or Hopper or Blackwell, this is Ada", "It fits: 15."]),
        (
            "a100",
            ["--quant_scheme", "FP8_DYNAMIC"],
            1,
            ["FP8_DYNAMIC runs on Ada or Hopper or Blackwell, this is Ampere"],
        ),
        # Control: the same scheme on a GPU that has it.
        ("h100", ["--quant_scheme", "FP8_DYNAMIC"], 0, ["this is Hopper"]),
        ("4090", ["--model_name_or_path", "Qwen/Qwen3-8B"], 1, ["It does not fit: rollout"]),
        ("h100", ["--steps_per_generation", "16"], 1, ["at least 16 prompts, got 9"]),
    ],
)
def test_a_run_is_checked_for_a_gpu_that_is_not_here(recipe, capsys, gpu, options, expected_code, words):
    engine = ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.5"]

    exit_code, _, printed = run_doctor(capsys, "--config", recipe, "--gpu", gpu, *engine, *options)

    assert exit_code == expected_code
    for word in words:
        assert word in printed.out
    # An engine of this machine says nothing about that GPU.
    assert "mismatch" not in printed.out.lower()


# Other trainers ------------------------------------------------------------------------------------------------------


QWEN = ("--model_name_or_path", "Qwen/Qwen3-0.6B")


@pytest.fixture(scope="module")
def of_trainers(recipe, tmp_path_factory):
    """A recipe of each of TRL's trainers, by its command."""
    folder = tmp_path_factory.mktemp("trainers")
    run = Path(recipe).parent
    rows = []
    for row in additions(9):
        text = f"{row['problem']} = {row['answer']}"
        rows.append({"problem": row["problem"], "text": text, "completion": "1"})
    write_rows(folder / "texts.jsonl", rows)

    common = f"model_name_or_path: {run}/model\noutput_dir: {folder}/out\nreport_to: none\n"
    texts = f"dataset_name_or_path: {folder}/texts.jsonl\nper_device_train_batch_size: 4\n"
    sums = f"dataset_name_or_path: {run}/sums.jsonl\nconversational: false\nmax_completion_length: 8\n"
    recipes = {
        "sft": f"{common}{texts}max_length: 32\n",
        "distill": f"{common}{texts}conversational: false\nmax_completion_length: 8\ndistill_on: rollouts\n",
        "rloo": f"{common}{sums}num_generations: 2\nbeta: 0.0\nnormalize_advantages: false\n",
    }
    paths = {}
    for command, text in recipes.items():
        paths[command] = str(folder / f"{command}.yaml")
        Path(paths[command]).write_text(text)
    return paths


@pytest.mark.parametrize(
    ("command", "settings", "has_rewards"),
    [
        ("sft", "W4A16, nll, 9 rows, nothing is sampled", False),
        ("distill", "W4A16, 9 prompts, rollouts by transformers (slow)", False),
        ("rloo", "W4A16, 9 prompts, rollouts by transformers (slow)", True),
    ],
)
def test_recipes_of_other_trainers_are_checked_by_their_own_settings(
    of_trainers, capsys, command, settings, has_rewards
):
    exit_code, statuses, printed = run_doctor(capsys, "--config", of_trainers[command])

    assert exit_code == 0
    assert settings in printed.out
    assert statuses["mismatch"] == SKIPPED
    assert ("Rewards" in printed.out) == has_rewards
    assert "nothing is sampled: not measured" in printed.out or command != "sft"
    # Control: its keys say which trainer it is.
    assert "trainer" not in statuses


def test_a_recipe_that_fits_several_trainers_is_said_to(recipe, capsys):
    _, statuses, printed = run_doctor(capsys, "--config", recipe)
    assert statuses["trainer"] == OK
    assert "Read as a recipe of qarl-trl train. Its keys also fit rloo or distill: --trainer says" in printed.out

    _, statuses, printed = run_doctor(capsys, "--config", recipe, "--trainer", "distill")
    assert "trainer" not in statuses
    assert "W4A16, 9 prompts, rollouts by transformers" in printed.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--teacher_model_name_or_path", "{other}"], "vocabulary of 64 tokens, got 32"),
        (["--teacher_model_name_or_path", "no/such-teacher"], "teacher_model='no/such-teacher' cannot be read"),
        (["--quant_scheme", "none"], "teacher_model_name_or_path is missing"),
        (["--gradient_accumulation_steps", "4"], "at least 16 prompts, got 9"),
    ],
)
def test_a_teacher_that_a_distillation_would_refuse_is_found(of_trainers, tmp_path, capsys, options, words):
    make_model(vocab_size=32, num_hidden_layers=1).save_pretrained(tmp_path / "other")
    options = [option.format(other=tmp_path / "other") for option in options]

    exit_code, _, printed = run_doctor(capsys, "--config", of_trainers["distill"], *options)

    assert exit_code == 1
    assert words in printed.out
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("gpu", "options", "code", "words"),
    [
        ("l4", [], 0, "It fits:"),
        ("l4", [*QWEN, "--teacher_model_name_or_path", "Qwen/Qwen3-0.6B"], 0, "It fits:"),
        # In bfloat16 this teacher takes 16.4 GB.
        ("l4", [*QWEN, "--teacher_model_name_or_path", "Qwen/Qwen3-8B"], 1, "mostly teacher 15.3"),
        ("a100", [*QWEN, "--teacher_model_name_or_path", "Qwen/Qwen3-8B"], 0, "It fits:"),
    ],
)
def test_a_distillation_is_checked_for_a_gpu_with_its_teacher(of_trainers, capsys, gpu, options, code, words):
    exit_code, _, printed = run_doctor(capsys, "--config", of_trainers["distill"], "--gpu", gpu, *options)

    assert exit_code == code
    assert words in printed.out


# The machine ---------------------------------------------------------------------------------------------------------


def test_versions_inside_of_their_windows_are_one_line_without_development_tools():
    (result,) = machine.compare_versions()

    assert result.status == OK
    assert "trl" in result.text
    assert "pytest" not in result.text


def test_a_version_outside_of_its_window_fails(monkeypatch):
    installed_version = versions.installed_version

    def with_another_trl(name):
        return "1.15.0" if name == "trl" else installed_version(name)

    # `machine` has a name of its own for the function, so its first line still shows the real version.
    monkeypatch.setattr(versions, "installed_version", with_another_trl)

    _, result = machine.compare_versions()

    assert result.status == FAIL
    assert result.name == "trl"
    assert "1.15.0" in result.text


AVX2 = frozenset(cpu_support.AVX2)
AVX512 = AVX2 | frozenset(cpu_support.AVX512)
VNNI = AVX512 | {"avx512_vnni"}


def machine_with_cpu(monkeypatch, flags):
    """A machine without a GPU, whose CPU has some features."""
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "cpu_flags", lambda: flags)


@pytest.mark.parametrize(
    ("flags", "schemes", "word"),
    [
        # It warned of 4 bits whatever the recipe was.
        (AVX2, ["FP8_DYNAMIC"], None),
        (AVX2, ["W4A8"], None),
        (AVX2, ["W4A16"], "AVX-512 for W4A16"),
        (AVX2, ["FP8_DYNAMIC", "W4A16_ASYM"], "AVX-512 for W4A16"),
        (AVX2, ["W8A8"], "without VNNI W8A8"),
        (AVX2, list(SUPPORTED), "AVX-512 for W4A16"),
        (AVX512, ["W4A16"], None),
        (AVX512, list(SUPPORTED), "without VNNI W8A8"),
        (VNNI, list(SUPPORTED), None),
        # Said before, of whatever scheme.
        (frozenset(), ["W4A16"], None),
    ],
)
def test_what_a_cpu_lacks_is_said_if_the_schemes_need_it(monkeypatch, flags, schemes, word):
    machine_with_cpu(monkeypatch, flags)

    results = list(machine.check_cpu_engine(SUPPORTED[name] for name in schemes))

    assert [result.status for result in results] == ([] if word is None else [WARN])
    assert word is None or word in results[0].text


@pytest.mark.parametrize(("flags", "status", "word"), [(frozenset(), WARN, "with AVX2"), (AVX2, OK, "cores")])
def test_a_cpu_without_an_engine_is_said(monkeypatch, flags, status, word):
    machine_with_cpu(monkeypatch, flags)

    # A warning about the engine follows the line of the CPU, which is the one with the cores.
    *_, last = machine.describe_devices()

    assert last.status == status
    assert word in last.text


@pytest.mark.parametrize(("scheme", "warns"), [("W4A16", True), ("FP8_DYNAMIC", False)])
def test_a_recipe_is_warned_of_the_engine_by_its_scheme(recipe, capsys, monkeypatch, scheme, warns):
    machine_with_cpu(monkeypatch, AVX2)

    _, statuses, printed = run_doctor(capsys, "--config", recipe, "--quant_scheme", scheme)

    assert ("engine on the CPU" in statuses) == warns
    assert printed.out.count("AVX-512") == int(warns)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_compiler_with_the_headers_of_python_is_enough_for_triton(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    assert machine.check_compiler().status == OK

    monkeypatch.setattr(machine.sysconfig, "get_path", lambda *_: str(tmp_path))
    without_headers = machine.check_compiler()
    assert without_headers.status == FAIL
    assert "Python.h: No such file" in without_headers.text

    monkeypatch.setenv("PATH", str(tmp_path))
    without_compiler = machine.check_compiler()
    assert without_compiler.status == FAIL
    assert "there is no gcc or clang" in without_compiler.text

    # Triton takes it whether it is there or not.
    monkeypatch.setenv("CC", "no-such-compiler")
    wrong_compiler = machine.check_compiler()
    assert wrong_compiler.status == FAIL
    assert "no-such-compiler does not run" in wrong_compiler.text


def test_nvcc_is_looked_for_where_flashinfer_does(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(machine, "TOOLKIT", tmp_path / "toolkit")
    # Installed by pip, where FlashInfer does not look.
    install_nvcc(tmp_path / "site-packages" / "nvidia" / "cu13" / "bin")

    missing = machine.check_nvcc()
    assert missing.status == WARN
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in missing.text
    assert "attention_backend: TRITON_ATTN" in missing.text

    in_toolkit = install_nvcc(tmp_path / "toolkit" / "bin")
    assert machine.check_nvcc() == CheckResult(OK, "nvcc", in_toolkit)
    on_path = install_nvcc(tmp_path / "path")
    assert machine.check_nvcc() == CheckResult(OK, "nvcc", on_path)
    # It takes this one whether nvcc is there or not.
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert machine.check_nvcc().status == WARN
    in_home = install_nvcc(tmp_path / "home" / "bin")
    assert machine.check_nvcc() == CheckResult(OK, "nvcc", in_home)


def test_vllm_has_the_attention_that_the_doctor_advises():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert "TRITON_ATTN" in AttentionBackendEnum.__members__


def install_nvcc(folder):
    """Its path."""
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.touch(mode=0o755)
    return str(nvcc)


def test_a_machine_with_a_gpu_is_asked_for_both_compilers(monkeypatch):
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine, "_check_gpu", lambda index: CheckResult(OK, f"GPU {index}", "a GPU"))

    assert [result.name for result in machine.describe_devices()] == ["GPU 0", "C compiler", "nvcc"]


# Rewards -------------------------------------------------------------------------------------------------------------


ROWS = [
    {"prompt": "p", "answer": "1"},
    # Not asked about: the next answer is the same, and so not a wrong one.
    {"prompt": "p", "answer": "2"},
    {"prompt": "p", "answer": "2"},
    {"prompt": "p", "answer": "3"},
]


def pays_for_wrong_answers(completions, answer, **_):
    rewards_of_all = []
    for text, expected in zip(completions, answer, strict=True):
        rewards_of_all.append(float(last_boxes(text) != [expected]))
    return rewards_of_all


async def asynchronous(completions, answer, **_):
    return math_reward(completions, answer)


def pays_for_any_box(completions, **_):
    return [1.0] * len(completions)


def scores_only_one_row(completions, answer, **_):
    rewards_of_all = math_reward(completions, answer)
    for index, expected in enumerate(answer):
        if expected != "2":
            rewards_of_all[index] = None
    return rewards_of_all


def raises_an_error(**_):
    return 1 / 0


@pytest.mark.parametrize(
    ("reward", "status", "words"),
    [
        (math_reward, OK, "right answers 1.00, wrong ones 0.00; told apart in 3 of 3 rows"),
        (asynchronous, OK, "3 of 3 rows"),
        (pays_for_any_box, WARN, "right answers 1.00, wrong ones 1.00; told apart in 0 of 3"),
        (scores_only_one_row, WARN, "right answers 1.00, wrong ones 0.00; told apart in 1 of 3"),
        (pays_for_wrong_answers, FAIL, "wrong answer pays more"),
        (raises_an_error, FAIL, "ZeroDivisionError"),
    ],
)
def test_a_reward_is_judged_by_right_and_wrong_answers(reward, status, words):
    result = rewards.check_reward(reward, ROWS)

    assert result.status == status
    assert words in result.text


@pytest.mark.parametrize("reward", [math_reward, asynchronous, pays_for_any_box, raises_an_error])
def test_a_reward_is_not_judged_if_all_answers_are_the_same(reward):
    # Also the one that raises: without a wrong answer it is not called.
    assert rewards.check_reward(reward, ROWS[1:3]).status == SKIPPED


def test_conversational_rows_get_messages():
    rows = [row | {"prompt": [{"role": "user", "content": "?"}]} for row in ROWS]

    assert rewards.check_reward(math_reward, rows).status == OK


# The mismatch --------------------------------------------------------------------------------------------------------


@pytest.fixture
def of_run(recipe, tmp_path):
    """A function from changed settings to the model's folder and a config."""

    def settings(**changes):
        args = QaRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], **changes)
        return str(Path(recipe).parent / "model"), args

    return settings


def test_the_learner_of_a_frozen_base_has_its_low_bit_layers(of_run):
    """It had none: the number of "QaRL" was a bf16 learner's."""
    folder, args = of_run(lora_base="frozen", model_init_kwargs={"dtype": "bfloat16"})
    token_ids = torch.arange(20)[None]

    learner = measure.load_frozen_learner(folder, args)

    assert len(dict(quantized_modules(learner))) == 7
    # What a frozen base was before: its layers are quantized while they load, and these were loaded otherwise.
    assert not dict(quantized_modules(measure.quantize_learner(measure.load_policy(folder, args), args)))
    with torch.no_grad():
        logits = learner(input_ids=token_ids).logits
        policy = measure.load_policy(folder, args)
        in_high_precision = policy(input_ids=token_ids).logits
        # The same weights, quantized where they are.
        merged = of_run(model_init_kwargs={"dtype": "bfloat16"})[1]
        expected = measure.quantize_learner(policy, merged)(input_ids=token_ids).logits
    assert torch.equal(logits, expected)
    # Control: the low bits count.
    assert not torch.equal(logits, in_high_precision)


def test_learner_and_engines_are_loaded_by_the_settings_of_the_run(of_run):
    rotary = {"rope_type": "default", "rope_theta": 40000.0}
    changes = {"dtype": "bfloat16", "rope_parameters": rotary, "trust_remote_code": True}
    folder, args = of_run(model_init_kwargs=changes)

    model = measure.load_policy(folder, args)
    engine = measure._engine_settings(folder, args, [[2, 3]])

    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters == rotary
    assert engine["hf_overrides"] == {"rope_parameters": rotary}
    assert engine["trust_remote_code"] is True
    # Control: without them TRL's dtype, and an engine that reads the file alone.
    folder, args = of_run()
    engine = measure._engine_settings(folder, args, [[2, 3]])
    assert measure.load_policy(folder, args).dtype == torch.float32
    assert engine["hf_overrides"] == {}
    assert engine["trust_remote_code"] is False


def test_an_engine_of_the_doctor_has_not_the_cache_of_the_run(of_run):
    in_run = {"kv_cache_memory_bytes": 80 * GIB, "block_size": 64}
    folder, args = of_run(use_vllm=True, vllm_engine_kwargs=in_run)

    engine = measure._engine_settings(folder, args, [[2, 3]])

    assert "kv_cache_memory_bytes" not in engine
    # Control: what else the run sets counts, and the run itself keeps its cache.
    assert engine["block_size"] == 64
    assert args.engine_kwargs == in_run


class Gpu:
    """A GPU of 24 GiB, of which a screen has one, and a learner on it, which needs 15."""

    def __init__(self, monkeypatch):
        self.learner = 0
        self.kept_by_pytorch = 0
        monkeypatch.setattr(QaRLConfig, "device", torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free(), 24 * GIB))
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)

    def free(self):
        return 23 * GIB - self.learner - self.kept_by_pytorch

    def empty_cache(self):
        self.kept_by_pytorch = 0

    def to(self, device):
        """As a learner's."""
        if device == "cpu":
            self.kept_by_pytorch = self.learner
        self.learner = 0 if device == "cpu" else 15 * GIB


@pytest.mark.parametrize("changes", [{}, {"lora_base": "frozen"}, {"quant_scheme": "none", "has_low_bit_cache": True}])
def test_the_learner_leaves_the_gpu_while_an_engine_samples_and_scores_on_it(of_run, monkeypatch, changes):
    """vLLM refused to start beside it, and doctor failed runs that would start."""
    has_low_bit_cache = changes.pop("has_low_bit_cache", False)
    folder, args = of_run(vllm_gpu_memory_utilization=0.5, **changes)
    monkeypatch.setattr(QaRLConfig, "has_low_bit_cache", has_low_bit_cache)
    gpu = Gpu(monkeypatch)
    steps = []

    def load(*_):
        gpu.to(args.device)
        return gpu

    def run_engine(step, function, model, settings, *_, **__):
        steps.append((settings["gpu_memory_utilization"], gpu.free() / GIB))

    def score(*_, **__):
        steps.append(gpu.learner / GIB)

    monkeypatch.setattr(measure, "choose_arithmetic", lambda: None)
    monkeypatch.setattr(measure, "load_policy", load)
    monkeypatch.setattr(measure, "load_frozen_learner", load)
    for name in ("apply_quantization", "remove_quantization", "save_low_bit", "quantize_learner"):
        monkeypatch.setattr(measure, name, lambda *_: None)
    monkeypatch.setattr(measure, "in_fresh_process", run_engine)
    monkeypatch.setattr(measure, "logp_diff", score)

    measure.measure(folder, args, [[2, 3]])

    # The run's share is for its low-bit weights: those in bfloat16 may not fit into it.
    assert steps == [(0.9, 23), 15, (0.9, 23), 15, 15]


def test_an_engine_gets_what_others_leave_of_a_gpu(of_run, monkeypatch):
    _, args = of_run()
    gpu = Gpu(monkeypatch)
    gpu.learner = 10 * GIB

    # And one GiB less, for what its process takes before vLLM looks.
    assert room.free_share(args.device) == 12 / 24


def test_weights_in_bfloat16_without_room_are_said_and_do_not_fail(of_run, monkeypatch):
    folder, args = of_run(use_vllm=True, chat_template_kwargs=None)
    dataset = Dataset.from_dict({"prompt": ["p"]})
    # 13.0 GiB, and 3 for work.
    monkeypatch.setattr(room, "shapes_in", lambda _: {"weight": (7, 10**9)})
    # A CPU has another limit.
    assert measure._why_not_measured(folder, args, dataset) is None

    gpu = Gpu(monkeypatch)
    assert measure._why_not_measured(folder, args, dataset) is None
    # Of another process.
    gpu.learner = 9 * GIB
    (result,) = measure.probe_mismatch(folder, args, dataset)
    assert result.status == SKIPPED
    assert "in bfloat16 needs 16.0 GiB of the GPU, and 13.0 are free: not measured" in result.text

    # Two GPUs have half of the weights each.
    args.vllm_tensor_parallel_size = 2
    assert measure._why_not_measured(folder, args, dataset) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_mismatch_is_measured_with_the_keys_of_the_model(recipe, capsys, monkeypatch, dtype):
    measured = []

    def probe_mismatch(folder, args, dataset):
        measured.append(args.model_init_kwargs["dtype"])
        yield from ()

    monkeypatch.setattr(measure, "probe_mismatch", probe_mismatch)

    run_doctor(capsys, "--config", recipe, "--dtype", dtype)

    assert measured == [dtype]


@pytest.mark.parametrize(
    ("changes", "quantize_learner", "status", "words"),
    [
        ({}, True, OK, "agree as far as kernels let them"),
        ({"learner": 0.03, "rollout_only": 0.031}, True, FAIL, "does not compute what the engine does"),
        ({"learner": 0.03, "rollout_only": 0.031, "weight_only": False}, True, WARN, "5.0 times the floor"),
        ({"learner": 0.012}, False, WARN, "2.0 times the floor"),
    ],
)
def test_the_verdict_follows_the_numbers(changes, quantize_learner, status, words):
    aligned = judge.Mismatch(floor=0.006, rollout_only=0.012, learner=0.0)
    args = SimpleNamespace(quantize_learner=quantize_learner, has_low_bit_cache=False)

    result = judge.judge_mismatch(replace(aligned, **changes), args)

    assert result.status == status
    assert words in result.text


def test_an_unaligned_cache_is_named_as_the_reason():
    mismatch = judge.Mismatch(floor=0.006, rollout_only=0.06, learner=0.05, weight_only=False)
    args = SimpleNamespace(quantize_learner=True, has_low_bit_cache=True, aligned_cache=None)

    assert judge.judge_mismatch(mismatch, args).text == "quantize_learner_kv: false leaves 8.3 times the floor"
    # Control: what an aligned cache leaves has another reason.
    args.aligned_cache = "fp8"
    assert "quantize_learner_kv" not in judge.judge_mismatch(mismatch, args).text


def thresholds_of_the_docs():
    """Threshold, advice for 4-bit and advice for 8-bit weights of each row of the table in docs/which_learner.md."""
    page = (DOCS / "which_learner.md").read_text()
    table = page.split("<!-- thresholds: begin -->")[1].split("<!-- thresholds: end -->")[0]

    shown = []
    # Below the header and the line under it.
    for line in table.strip().splitlines()[2:]:
        cells = line.replace("`", "").strip("|").split("|")
        shown.append([cell.strip() for cell in cells])
    return shown


# Two copies of one table: users read that of the page before a run, and that of the doctor after it.
def test_the_docs_show_the_thresholds_and_the_advice_that_the_doctor_reads():
    rows = json.loads(RULE.read_text())

    said = [[f"{row['from']:g}", row["4-bit weights"], row["8-bit weights"]] for row in rows]
    assert said == thresholds_of_the_docs()


def test_the_thresholds_begin_at_0_and_rise():
    thresholds = [row["from"] for row in json.loads(RULE.read_text())]

    assert thresholds[0] == 0
    assert thresholds == sorted(thresholds)


@pytest.mark.parametrize(("rollout_only", "row"), [(0.0, 0), (0.0029, 0), (0.003, 1), (0.27, 2)])
@pytest.mark.parametrize("four_bits", [True, False])
def test_the_advice_is_that_of_the_last_threshold_reached(rollout_only, row, four_bits):
    rows = json.loads(RULE.read_text())

    result = judge.advise_on_qarl(rollout_only, quantize_learner=True, four_bits=four_bits)

    assert result.status == OK
    assert rows[row]["4-bit weights" if four_bits else "8-bit weights"] in result.text
    assert "docs/which_learner.md" in result.text


@pytest.mark.parametrize(
    ("scheme", "advises"), [("W4A16", True), ("W4A8", True), ("FP8_DYNAMIC", False), ("W8A8", False)]
)
@pytest.mark.parametrize("rollout_only", [0.01, 0.1])
def test_gptq_is_advice_for_4_bit_weights(of_run, monkeypatch, scheme, advises, rollout_only):
    folder, args = of_run(quant_scheme=scheme, use_vllm=True, chat_template_kwargs=None)
    monkeypatch.setattr(measure, "_why_not_measured", lambda *_: None)
    monkeypatch.setattr(measure, "measure", lambda *_: judge.Mismatch(0.002, rollout_only, 0.0))

    *_, result = measure.probe_mismatch(folder, args, {"prompt": ["p"]})

    assert result.name == "which learner?"
    assert ("GPTQ" in result.text) == advises


@pytest.mark.parametrize(("rollout_only", "status"), [(0.03, OK), (0.05, WARN), (0.93, WARN)])
def test_a_run_whose_learner_is_far_from_its_engine_is_not_ok(monkeypatch, tmp_path, rollout_only, status):
    """0.93 nats per token were called "ok"."""
    args = SimpleNamespace(
        quantize_learner=False,
        quantized=True,
        quant_name="W4A16",
        quant_plan=lambda: None,
        has_low_bit_cache=False,
        trust_remote_code=False,
        model_init_kwargs=None,
        chat_template_kwargs=None,
    )
    measured = judge.Mismatch(floor=0.002, rollout_only=rollout_only, learner=rollout_only)
    monkeypatch.setattr(measure, "_why_not_measured", lambda *_: None)
    monkeypatch.setattr(measure.AutoTokenizer, "from_pretrained", lambda *_, **__: None)
    monkeypatch.setattr(measure, "_prompt_ids", lambda *_: [[1]])
    # Reads the variable when it is called, so that the control below can change it.
    monkeypatch.setattr(measure, "measure", lambda *_: measured)

    def statuses():
        results = measure.probe_mismatch("folder", args, {"prompt": ["p"]})
        return {result.name: result.status for result in results}

    without = statuses()
    assert (without["quantized rollout"], without["this run"], without["which learner?"]) == (status,) * 3

    # Control: a bf16 learner is none of this run's.
    args.quantize_learner = True
    measured = judge.Mismatch(floor=0.002, rollout_only=rollout_only, learner=0.0)
    aligned = statuses()
    assert (aligned["quantized rollout"], aligned["QaRL"], aligned["which learner?"]) == (OK,) * 3
