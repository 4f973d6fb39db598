"""Recipes of TRL's other trainers: what `plan` takes them for, and the teacher of a distillation, in bytes."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_model
from slow.toys import make_tokenizer, save_model
from toy_runs import adapter
from trainers.runs import pairs, settings
from transformers import AutoModelForCausalLM
from trl.kernels import chunked_divergence

from qarl_trl import LowBitDistillationConfig, LowBitDistillationTrainer
from qarl_trl.methods import METHODS
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.store import low_bit_store
from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.gpus import GPUS
from qarl_trl.tools.plan.memory import backward
from qarl_trl.tools.plan.memory.advice import advise
from qarl_trl.tools.plan.memory.learner import host_bytes
from qarl_trl.tools.plan.memory.moments import fits, moments, peaks
from qarl_trl.tools.plan.run import Hardware, Teacher
from qarl_trl.tools.plan.settings import _teacher_of
from tools.plan.runs import example_run, lever_names, model_in_low_bits, nbytes, peak_bytes, trial_of
from tools.plan.test_command import plan


RECIPES = Path(__file__).parents[3] / "recipes"
DISTILL = RECIPES / "trainers" / "distill.yaml"
SFT = RECIPES / "trainers" / "sft.yaml"
RLOO = RECIPES / "trainers" / "rloo.yaml"
LORA = ("--use_peft", "true", "--lora_target_modules", "all-linear", "--lora_dropout", "0", "--dtype", "bfloat16")
# As the model cards count them: Qwen2.5-0.5B, its embedding (151,936 x 896) and the norm after its layers, and 1.5B.
SMALL = 494_032_768
OUTSIDE_LAYERS = 151_936 * 896 + 896
LARGE = 1_543_714_304


def run_of(path, command, *argv, gpus=1, sharding="fsdp2"):
    """The run of a recipe, in numbers."""
    hardware = Hardware(gpus, 79, sharding)
    return advise(["--config", str(path), *argv], hardware, METHODS[command]).run


# Which trainer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "first_line"),
    [
        ([DISTILL], "distill: Qwen/Qwen2.5-0.5B-Instruct, W4A16: 0.49 billion parameters"),
        ([SFT], "sft: Qwen/Qwen2.5-0.5B, W4A16: 0.49 billion parameters"),
        ([RLOO, "--trainer", "rloo"], "rloo: Qwen/Qwen2.5-0.5B-Instruct, W4A16: 0.49 billion parameters"),
        # It has only keys that others have too.
        ([RLOO], "Read as a recipe of qarl-trl train. Its keys also fit rloo: --trainer says which."),
        ([RLOO, "--normalize_advantages", "true"], "rloo: Qwen/Qwen2.5-0.5B-Instruct, W4A16: 0.49 billion parameters"),
        (
            [RECIPES / "one_gpu" / "qwen2.5-0.5b.yaml"],
            "Qwen/Qwen2.5-0.5B-Instruct, W4A16: 0.49 billion parameters",
        ),
    ],
)
def test_a_recipe_is_taken_for_what_its_keys_say(capsys, argv, first_line):
    code, printed = plan(capsys, "--memory", 79, "--config", *argv)

    assert code == 0
    assert printed.out.splitlines()[0] == first_line


@pytest.mark.parametrize(
    ("path", "argv", "words"),
    [
        (DISTILL, ["--distil_on", "answers"], "distil_on is not a key of a recipe. Did you mean distill_on?"),
        (DISTILL, ["--trainer", "train"], "distill_on is not a key of a recipe."),
        (
            DISTILL,
            ["--teacher_model_name_or_path", "no/such"],
            "teacher_model_name_or_path='no/such' is not",
        ),
        (DISTILL, ["--teacher_model_name_or_path", "Qwen/Qwen2.5-7B"], "vocabulary of 151936 tokens, got 152064"),
        (DISTILL, ["--quant_scheme", "none"], "teacher_model_name_or_path is missing"),
        (
            DISTILL,
            [*LORA, "--sharding", "ddp", "--teacher_model_init_kwargs", '{"revision": "v2"}'],
            "needs a teacher that is loaded",
        ),
        (DISTILL, ["--gpu", "h100", "--from", "somewhere"], "--from corrects seconds, which plan does not estimate"),
        (SFT, ["--max_length", "null"], "max_length"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, path, argv, words):
    code, printed = plan(capsys, "--memory", 79, "--config", path, *argv)

    assert code == 2
    assert words in printed.err
    assert len(printed.err.strip().splitlines()) == 1


def test_a_student_in_low_bits_is_no_teacher_of_itself(capsys, tmp_path):
    argv = ("--memory", 79, "--config", DISTILL, "--model_name_or_path", model_in_low_bits(tmp_path))

    # In another scheme, too.
    code, printed = plan(capsys, *argv, "--quant_scheme", "FP8_DYNAMIC")
    assert code == 2
    assert "teacher_model_name_or_path is missing: a quantized checkpoint has nothing to teach." in printed.err
    code, _ = plan(capsys, *argv, "--quant_scheme", "FP8_DYNAMIC", "--teacher_model_name_or_path", "Qwen/Qwen2.5-1.5B")
    assert code == 0


def test_fine_tuning_has_no_engine_no_rollout_and_rows_of_its_length(capsys):
    run = run_of(SFT, "sft")

    assert (run.engine, run.rows, run.tokens, run.budget) == ("", 4, 2048, None)
    assert moments(run).keys() == {"backward"}
    code, printed = plan(capsys, "--config", SFT, "--gpu", "4090")
    assert code == 0
    for word in ("rollout", "engine", "sync", "vllm", "optim_muon"):
        assert word not in printed.out
    assert "No seconds: those of sft are not estimated." in printed.out
    # Control: a run that samples has them.
    code, printed = plan(capsys, "--config", DISTILL, "--gpu", "4090")
    assert "rollout" in printed.out
    assert "engine of 1 GPU" in printed.out


def test_rloo_is_grpo_in_padded_passes():
    rloo = run_of(RLOO, "rloo")
    grpo = run_of(RLOO, "train")

    assert moments(rloo) == moments(replace(grpo, budget=None))
    assert moments(rloo) != moments(grpo)  # control: packed passes take less
    # TRL's default penalty keeps a reference model, in the dtype of the student.
    penalty = moments(run_of(RLOO, "rloo", "--beta", "0.05"))["backward"]
    assert penalty["reference model"] == 4 * SMALL
    assert "reference model" not in moments(rloo)["backward"]


@pytest.mark.parametrize(("command", "path"), [("distill", DISTILL), ("sft", SFT), ("rloo", RLOO)])
def test_recipes_for_one_gpu_of_24_gb_fit_it(command, path):
    assert "on one GPU of 24 GB" in path.read_text().splitlines()[0]
    card = GPUS["4090"].memory
    run = advise(["--config", str(path)], Hardware(1, card), METHODS[command]).run
    assert fits(run)

    # Control: with a large teacher it does not.
    if command == "distill":
        large = ["--config", str(path), "--teacher_model_name_or_path", "Qwen/Qwen2.5-3B-Instruct"]
        assert not fits(advise(large, Hardware(1, card), METHODS[command]).run)


def test_given_answers_are_not_sampled():
    sampled = run_of(DISTILL, "distill")
    given = run_of(DISTILL, "distill", "--distill_on", "answers", "--use_vllm", "false")

    assert moments(given).keys() == {"backward"}
    assert moments(given)["backward"] == moments(sampled)["backward"]


# The teacher, by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], 2 * SMALL),  # its own start, in the dtype of the checkpoint
        (["--teacher_model_init_kwargs", '{"dtype": "float32"}'], 4 * SMALL),
        (["--teacher_model_name_or_path", "Qwen/Qwen2.5-1.5B-Instruct"], 2 * LARGE),
        (LORA, 0),  # the base of the adapter
        ([*LORA, "--lora_base", "frozen"], 2 * SMALL),
        ([*LORA, "--lora_modules_to_save", "embed_tokens"], 2 * SMALL),
        ([*LORA, "--teacher_model_name_or_path", "Qwen/Qwen2.5-0.5B-Instruct"], 2 * SMALL),
    ],
)
def test_bytes_of_a_teacher(argv, expected):
    run = run_of(DISTILL, "distill", *argv)

    for sizes in moments(run).values():
        assert sizes.get("teacher", 0) == expected
    # It loads beside the student, of which there are float32 or bfloat16 weights, or low-bit ones.
    without = host_bytes(replace(run, teacher=None))
    assert host_bytes(run) == without + expected


def test_eight_gpus_have_a_teacher_each_or_shards_of_one():
    ddp = moments(run_of(DISTILL, "distill", gpus=8, sharding="ddp"))["backward"]
    sharded = moments(run_of(DISTILL, "distill", gpus=8))["backward"]
    # FSDP2 gathers low bits, so the base of an adapter is no teacher there.
    lora = moments(run_of(DISTILL, "distill", *LORA, gpus=8))["backward"]

    assert ddp["teacher"] == 2 * SMALL
    # All dimensions are multiples of 8. The output layer, which is the embedding, stays gathered in bfloat16.
    assert sharded["teacher"] == 2 * SMALL // 8 + 2 * OUTSIDE_LAYERS
    assert lora["teacher"] == sharded["teacher"]
    # Control: an embedding that is none of it does not. Qwen3-8B has two matrices of 151,936 x 4,096.
    apart = ["--model_name_or_path", "Qwen/Qwen3-8B"]
    large = moments(run_of(DISTILL, "distill", *apart, gpus=8))["backward"]
    assert large["teacher"] == 2 * 8_190_735_360 // 8 + 2 * (151_936 * 4096 + 4096)
    assert "teacher" not in moments(run_of(DISTILL, "distill", *LORA, gpus=8, sharding="ddp"))["backward"]


def test_the_loss_has_a_tile_of_the_logits_of_student_and_teacher_in_float32():
    run = run_of(DISTILL, "distill")

    # 8 answers of 512 tokens: as many as a tile has rows, and 32768 of the 151936 logits of each.
    answers = 8 * 512
    tiles = answers * 32768 * (4 + 4 + 2)  # student, teacher, and the gradient in bfloat16
    gradients = 4 * 896 * (answers + 151_936)
    assert backward._head_work(run) == tiles + gradients
    # The last hidden states of both, in the dtype of their weights.
    assert moments(run)["backward"]["compared hidden states"] == answers * 896 * (4 + 2)
    # Control: no other trainer has any.
    assert "compared hidden states" not in moments(replace(run, teacher=None))["backward"]
    assert backward._head_work(replace(run, teacher=None)) < tiles


def test_a_teacher_of_four_bytes_may_be_halved():
    plain = run_of(DISTILL, "distill")
    four = ("--teacher_model_init_kwargs", '{"dtype": "float32", "attn_implementation": "eager"}')
    advised = advise(["--config", str(DISTILL), *four], Hardware(1, 79), METHODS["distill"])

    lever = trial_of(advised, "teacher in bfloat16")
    assert peaks(lever.run) == peaks(plain)
    # As it is pasted into a shell, with what else the recipe says.
    expected = """--teacher_model_init_kwargs '{"dtype": "bfloat16", "attn_implementation": "eager"}'"""
    assert lever.lever.text == expected
    # Control: no lever where it has two bytes, or there is none.
    for command, path in (("distill", DISTILL), ("rloo", RLOO)):
        advised = advise(["--config", str(path)], Hardware(1, 79), METHODS[command])
        assert "teacher in bfloat16" not in lever_names(advised)


@pytest.mark.parametrize(("command", "path"), [("distill", DISTILL), ("sft", SFT), ("rloo", RLOO)])
def test_levers_of_other_trainers_are_those_that_they_have(command, path):
    advised = advise(["--config", str(path)], Hardware(1, 79), METHODS[command])

    names = lever_names(advised)
    assert {"gradient checkpointing", "AdamW in 8 bits", "LoRA", "LoRA, frozen base"} <= names
    assert ("sleep mode" in names) == (command != "sft")

    refused = []
    for trial in advised.alone:
        if trial.run is None:
            refused.append(trial.refusal.partition(" ")[0])
    assert refused == ["use_liger_kernel"]


@pytest.mark.parametrize(("command", "path"), [("distill", DISTILL), ("sft", SFT), ("rloo", RLOO)])
def test_what_does_not_fit_is_proposed_in_words_of_its_trainer(command, path):
    hardware = Hardware(1, 12)
    advised = advise(["--config", str(path)], hardware, METHODS[command])
    assert advised.together

    for fitting in advised.together:
        again = run_of(path, command, *shlex.split(fitting.text))
        # Written for the memory of that card.
        assert max(peaks(replace(again, memory=advised.run.memory)).values()) <= advised.run.memory


# The teacher, against real tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "lora", "changes", "size"),
    [
        (torch.bfloat16, False, {}, 2),
        (torch.float32, False, {}, 4),
        (torch.float32, False, {"teacher_model_init_kwargs": {"dtype": "bfloat16"}}, 2),
        (torch.bfloat16, True, {}, 0),
        (torch.bfloat16, True, {"lora_base": "frozen"}, 2),
    ],
)
def test_a_trainer_has_the_bytes_of_a_teacher_that_are_counted(tmp_path, dtype, lora, changes, size):
    folder = save_model(tmp_path / "float32", layers=1)
    path = str(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(path)
    values = settings(tmp_path / "run", distill_on="answers", max_completion_length=8, **changes)
    peft_config = adapter() if lora else None

    counted = _teacher_of(path, meta.read_config(path), LowBitDistillationConfig(**values), peft_config, False)
    trainer = LowBitDistillationTrainer(
        path,
        None,
        LowBitDistillationConfig(**values),
        pairs(),
        processing_class=make_tokenizer(),
        peft_config=peft_config,
    )

    weights = list(trainer.teacher_model.parameters())
    assert nbytes(weights) == sum(parameter.entries * parameter.size for parameter in counted.parameters)
    # Without bytes of its own it has no weights: the student without its adapter is the teacher.
    assert bool(weights) == bool(size)
    for weight in weights:
        assert weight.element_size() == size
        # Else autocast would keep a copy of each, and FSDP2 would make them float32.
        assert not weight.requires_grad

    # Control: the student has an adapter, of rank 4, or none.
    factors = [weight for weight in trainer.model.parameters() if weight.requires_grad and weight.shape[0] == 4]
    assert bool(factors) == lora


# Wider than other toys, so that layers are not lost beside logits; its MLP is as wide as Qwen2.5's.
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 1536}


def with_teacher(student, teacher, **changes):
    """The run of a student and a teacher, both real, that compare half of a row."""
    of_teacher = Teacher("another", meta.parameters(teacher, ""), teacher.config, positions=512)
    changes = {"rows": 2, "tokens": 1024, "budget": None, "teacher": of_teacher, "compute": 4} | changes
    return example_run(student, student.config, muon=False, **changes)


def hidden_states(model, ids, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, True), (torch.float32, True), (torch.float32, False)]
)
def test_peak_of_a_teachers_forward(dtype, autocast):
    """Within 10 %."""
    teacher = make_model("llama", num_hidden_layers=3, dtype=dtype, **WIDE).eval().requires_grad_(False)
    ids = torch.randint(2, 64, (2, 1024))
    run = with_teacher(make_model("llama", num_hidden_layers=1), teacher, compute=2 if autocast else 4)

    def forward():
        with torch.no_grad():
            return hidden_states(teacher, ids, autocast)

    forward()
    peak = peak_bytes(forward)
    assert peak == pytest.approx(backward.teacher_work(run), rel=0.1)

    # Control: weights that want a gradient leave their casts until autocast ends.
    if dtype == torch.float32 and autocast:
        teacher.requires_grad_(True)
        casts = 2 * sum(parameter.entries for parameter in run.teacher.parameters if parameter.layer)
        assert peak_bytes(forward) > 0.9 * (peak + casts)


@pytest.mark.parametrize("tile", [32768, 64])
def test_peak_of_an_update_of_a_distillation(monkeypatch, tile):
    """Within 10 %: what the student saved, the teacher's states and the head, or a layer, of the backward."""
    monkeypatch.setattr(backward, "TILE", (4096, tile))
    monkeypatch.setattr(chunked_divergence, "VOCAB_CHUNK_SIZE", tile)
    # On a GPU a kernel reads a tile and makes none; torch's stand-in for it makes several.
    monkeypatch.setattr(chunked_divergence, "_stats_tile", lambda *args, **kwargs: None)
    monkeypatch.setattr(chunked_divergence, "_backward_tile", lambda *args, **kwargs: None)

    student = make_model("llama", num_hidden_layers=4, **WIDE).train()
    teacher = make_model("llama", num_hidden_layers=4, **WIDE).eval().requires_grad_(False)
    apply_quantization(student, "W4A16")
    low_bit_store(student).will_be_told()
    student.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(2, 64, (2, 1024))

    def update():
        of_student = hidden_states(student, ids)[:, -512:]
        with torch.no_grad():
            of_teacher = hidden_states(teacher, ids)[:, -512:]
        divergence, _ = chunked_divergence.ChunkedDivergenceFunction.apply(
            of_student.reshape(-1, 256), student.lm_head.weight, None,
            of_teacher.reshape(-1, 256), teacher.lm_head.weight, None, 0.0,
        )  # fmt: skip
        divergence.sum().backward()

    # Makes gradients and quantized values, which stay.
    update()
    run = with_teacher(student, teacher, low_bit_forward=True)

    def estimated(run):
        work = max(backward.backward_work(run), backward.teacher_work(run))
        return backward.activations(run) + backward.compared_states(run) + work

    peak = peak_bytes(update)
    assert peak == pytest.approx(estimated(run), rel=0.1)
    # Control: the size of a tile counts.
    other_tile = 64 if tile == 32768 else 32768
    monkeypatch.setattr(backward, "TILE", (4096, other_tile))
    assert peak != pytest.approx(estimated(run), rel=0.1)
