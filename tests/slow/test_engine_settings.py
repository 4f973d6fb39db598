"""What a real engine takes from the run: its seed, the tokens that end an answer, and the weights of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

from slow.isolated import isolated
from slow.toys import (
    copies,
    distinct_characters,
    engine_logprobs,
    logged,
    make_tokenizer,
    make_trainer,
    prompts,
    save_model,
    settings,
    stored_tensors,
)


pytestmark = pytest.mark.slow
# Of the model's files, and of another tokenizer for them.
EOS_OF_FILES = "<eos>"
OTHER_EOS = "#"
# Two formulas of a log-softmax: measured 1e-7, as in test_mismatch.py. Other weights are six orders of magnitude away.
FLOOR = 1e-6
FAR_ABOVE = 0.1


@contextmanager
def _engine_setting(**replaced: Any) -> Iterator[None]:
    """Start engines with these arguments instead of those of the run."""
    from qarl_trl.rollout.engine import LowBitVLLMGeneration

    start = LowBitVLLMGeneration.__init__

    def start_with_replaced(engine: Any, *args: Any, **kwargs: Any) -> None:
        start(engine, *args, **kwargs | replaced)

    with patch.object(LowBitVLLMGeneration, "__init__", start_with_replaced):
        yield


def _completions(trainer: Any, number: int = 32) -> list[list[int]]:
    """Token ids of answers to a few prompts, which do not depend on the run, by the engine of a trainer."""
    prompt_ids = make_tokenizer()(prompts(number)["prompt"][:])["input_ids"]

    # Not by `train`, whose order of prompts depends on the seed, too.
    engine = trainer.vllm_generation
    engine.sync_weights()
    _, completion_ids, *_ = engine.generate(prompt_ids, images=None, num_generations=1)
    return completion_ids


# The seed ------------------------------------------------------------------------------------------------------------


def _completions_of_seed(model: str, folder: str, seed: int, replaced: dict[str, Any]) -> list[list[int]]:
    """What a run with this seed draws first."""
    with _engine_setting(**replaced):
        trainer = make_trainer(model, Path(folder), seed=seed)
    return _completions(trainer)


@pytest.fixture(scope="module")
def draws_of_seed(tmp_path_factory):
    """What a new run draws, by its seed, and by that of its engine if this is not from the run."""
    folder = tmp_path_factory.mktemp("seed")
    model = save_model(folder / "model")

    def draw(seed, engine_seed=None):
        replaced = {} if engine_seed is None else {"seed": engine_seed}
        return isolated(_completions_of_seed, model, str(folder / "run"), seed, replaced)

    return draw


def test_runs_with_different_seeds_draw_different_completions(draws_of_seed):
    first = draws_of_seed(3)

    assert draws_of_seed(4) != first
    assert draws_of_seed(3) == first  # control: the seed alone makes the difference


def test_with_one_seed_for_all_engines_runs_with_different_seeds_draw_the_same(draws_of_seed):
    """The control: TRL starts every engine so."""
    assert draws_of_seed(3, engine_seed=0) == draws_of_seed(4, engine_seed=0)


# The tokens that end an answer ---------------------------------------------------------------------------------------


def _completions_with_other_eos(model: str, folder: str, replaced: dict[str, Any]) -> list[list[int]]:
    """What a run draws whose tokenizer has another EOS token than the files of the model, which the engine reads."""
    from qarl_trl import QaRLConfig, QaRLTrainer

    tokenizer = make_tokenizer()
    tokenizer.eos_token = OTHER_EOS

    with _engine_setting(**replaced):
        trainer = QaRLTrainer(
            model,
            distinct_characters,
            QaRLConfig(**settings(Path(folder))),
            train_dataset=prompts(),
            processing_class=tokenizer,
        )
    return _completions(trainer, number=64)


def _ends_and_goes_on(completions: list[list[int]], token: str) -> tuple[int, int]:
    """How many completions end with a token, and how many go on after it."""
    token_id = make_tokenizer().convert_tokens_to_ids(token)
    ending = 0
    going_on = 0
    for tokens in completions:
        ending += tokens[-1] == token_id
        going_on += token_id in tokens[:-1]
    return ending, going_on


def test_the_eos_token_of_the_processing_class_ends_answers(tmp_path):
    completions = isolated(_completions_with_other_eos, save_model(tmp_path / "model"), str(tmp_path / "run"), {})

    ending, going_on = _ends_and_goes_on(completions, OTHER_EOS)
    # Of 64 answers, so that the second number is no accident.
    assert ending > 5
    assert going_on == 0
    # The token of the model's files ends them still, as it does in TRL.
    ending, going_on = _ends_and_goes_on(completions, EOS_OF_FILES)
    assert ending > 5
    assert going_on == 0


def test_an_engine_that_knows_only_the_files_of_the_model_goes_on_after_that_token(tmp_path):
    """The control."""
    model = save_model(tmp_path / "model")
    replaced = {"stop_token_ids": None}
    completions = isolated(_completions_with_other_eos, model, str(tmp_path / "run"), replaced)

    _, going_on = _ends_and_goes_on(completions, OTHER_EOS)
    assert going_on > 5
    _, going_on = _ends_and_goes_on(completions, EOS_OF_FILES)
    assert going_on == 0


def _completions_of_changed_ends(model: str, folder: str, replaced: dict[str, Any]) -> list[list[int]]:
    """What a run draws in whose model, in memory, one token less ends an answer than in the files."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.generation_config.eos_token_id = make_tokenizer().eos_token_id
    with _engine_setting(**replaced):
        trainer = make_trainer(loaded, Path(folder))
    return _completions(trainer, number=64)


def test_an_end_token_that_a_script_took_out_ends_no_answer(tmp_path):
    model = save_model(tmp_path / "model")
    tokenizer = make_tokenizer()
    file = tmp_path / "model" / "generation_config.json"
    of_files = json.loads(file.read_text())
    of_files["eos_token_id"] = tokenizer.convert_tokens_to_ids([EOS_OF_FILES, OTHER_EOS])
    file.write_text(json.dumps(of_files))

    completions = isolated(_completions_of_changed_ends, model, str(tmp_path / "run"), {})
    _, going_on = _ends_and_goes_on(completions, OTHER_EOS)
    assert going_on > 5
    ending, going_on = _ends_and_goes_on(completions, EOS_OF_FILES)
    assert ending > 5
    assert going_on == 0

    # Control: an engine that goes by the files.
    by_files = {"stop_token_ids": None}
    completions = isolated(_completions_of_changed_ends, model, str(tmp_path / "by_files"), by_files)
    _, going_on = _ends_and_goes_on(completions, OTHER_EOS)
    assert going_on == 0


# The weights of an evaluation ----------------------------------------------------------------------------------------


class EvaluateOtherWeights(TrainerCallback):
    """
    Evaluates other weights, as an average of the weights is evaluated: puts them in, and back.

    After step 2 the run has not sampled yet with the weights of that step, after step 4 an evaluation of the run's own
    weights comes first.
    """

    def __init__(self, trainer: Any, other_weights: dict[str, torch.Tensor]) -> None:
        self.trainer = trainer
        self.other_weights = other_weights
        # Whether the engine answered otherwise after the evaluation of other weights than after that of the run's own.
        self.engine_moved = False

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            self._evaluate_other_weights(model)

        if state.global_step == 4:
            llm = self.trainer.vllm_generation.llm
            self.trainer.evaluate()
            answers = engine_logprobs(llm)
            self._evaluate_other_weights(model)
            self.engine_moved = engine_logprobs(llm) != answers

    def _evaluate_other_weights(self, model: torch.nn.Module) -> None:
        weights = copies(model.state_dict().items())
        model.load_state_dict(self.other_weights)
        self.trainer.evaluate()
        model.load_state_dict(weights)


def _swap_weights(model: str, other: str, folder: str, stock_evaluate: bool) -> dict[str, Any]:
    """Mismatches of the rollouts and evaluations of a run that evaluates other weights twice."""
    from transformers import AutoModelForCausalLM
    from trl import GRPOTrainer

    from qarl_trl.trainers.low_bit import LowBitMixin

    if stock_evaluate:
        LowBitMixin.evaluate = GRPOTrainer.evaluate

    # A rollout batch before each odd step.
    trainer = make_trainer(model, Path(folder), max_steps=6, per_device_eval_batch_size=8)
    trainer.eval_dataset = prompts(16)
    other_weights = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).state_dict()
    callback = EvaluateOtherWeights(trainer, other_weights)
    trainer.add_callback(callback)
    trainer.train()

    rollouts = {}
    for row in trainer.state.log_history:
        if "mismatch/logp_diff_mean" in row:
            rollouts[row["step"]] = row["mismatch/logp_diff_mean"]
    return {
        "rollouts": rollouts,
        "evaluations": logged(trainer, "eval_mismatch/logp_diff_mean"),
        "engine moved": callback.engine_moved,
    }


@pytest.fixture(scope="module")
def swaps(tmp_path_factory):
    """The run with our `evaluate` and with the Trainer's own."""
    folder = tmp_path_factory.mktemp("swaps")
    model = save_model(folder / "model")
    other = save_model(folder / "other", seed=1)

    runs = {}
    for name, stock_evaluate in (("ours", False), ("stock", True)):
        runs[name] = isolated(_swap_weights, model, other, str(folder / name), stock_evaluate)
        assert list(runs[name]["rollouts"]) == [1, 3, 5]
        assert len(runs[name]["evaluations"]) == 3
    print(runs)
    return runs


def test_an_evaluation_samples_from_weights_that_were_just_loaded(swaps):
    _, own_weights, loaded_weights = swaps["ours"]["evaluations"]

    assert 0 < own_weights < FLOOR
    assert 0 < loaded_weights < FLOOR
    assert swaps["ours"]["engine moved"]


def test_by_the_trainers_own_evaluate_it_samples_from_the_weights_before(swaps):
    """The control: the engine was synced in this step."""
    _, own_weights, loaded_weights = swaps["stock"]["evaluations"]

    assert 0 < own_weights < FLOOR
    assert loaded_weights > FAR_ABOVE
    assert not swaps["stock"]["engine moved"]


def test_the_rollout_after_an_evaluation_of_other_weights_is_from_the_runs_own(swaps):
    first, after_other_weights, after_both = swaps["ours"]["rollouts"].values()

    assert 0 < first < FLOOR
    assert 0 < after_other_weights < FLOOR
    assert 0 < after_both < FLOOR


def test_by_the_trainers_own_evaluate_it_is_from_the_other_weights(swaps):
    """The control: the evaluation synced the engine, in the step in which the rollout follows."""
    rollouts = swaps["stock"]["rollouts"]

    assert 0 < rollouts[1] < FLOOR
    assert rollouts[3] > FAR_ABOVE


# A config that only the learner has ----------------------------------------------------------------------------------


def _train_with_added_tokens(model: str, folder: str) -> list[float]:
    """The mismatches of a run whose tokenizer and embedding got more tokens in memory; each prompt has a new one."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from qarl_trl import QaRLConfig, QaRLTrainer

    # To 77 tokens, beyond the 64 that the file says.
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<new{number}>" for number in range(60)])
    learner = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    learner.resize_token_embeddings(80)

    trainer = QaRLTrainer(
        learner,
        distinct_characters,
        QaRLConfig(**settings(Path(folder))),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"] + "<new59>"} for row in prompts()]),
        processing_class=tokenizer,
    )
    assert tokenizer("<new59>")["input_ids"] == [76]  # above the 64 tokens of the file
    trainer.train()
    return logged(trainer, "mismatch/logp_diff_mean")


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"], ids=["tied", "untied"])
def test_tokens_that_were_added_in_memory_are_known_to_the_engine(tmp_path, family):
    """The engine reads the number of tokens from a file: "out of vocabulary" otherwise."""
    model = save_model(tmp_path / "model", family=family)

    mismatches = isolated(_train_with_added_tokens, model, str(tmp_path / "run"))

    assert len(mismatches) == 2
    assert max(mismatches) < FLOOR


def _train_with_two_matrices(model: str, folder: str, as_is: bool) -> list[float]:
    """The mismatches of a run whose checkpoint has an output layer of its own, and says that it is the embedding."""
    from qarl_trl.trainers import policy

    weights = stored_tensors(model)
    generator = torch.Generator().manual_seed(3)
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding + 0.05 * torch.randn(embedding.shape, generator=generator)
    save_file(weights, Path(model) / "model.safetensors", metadata={"format": "pt"})

    if as_is:
        policy.config_wrongly_ties_head = lambda model: False
    trainer = make_trainer(model, Path(folder))
    trainer.train()
    return logged(trainer, "mismatch/logp_diff_mean")


def test_an_output_layer_of_its_own_reaches_the_engine_against_the_models_config(tmp_path):
    model = save_model(tmp_path / "model", family="Qwen2")

    mismatches = isolated(_train_with_two_matrices, model, str(tmp_path / "run"), False)

    assert len(mismatches) == 2
    assert max(mismatches) < FLOOR
    # Control: by its config the engine has one matrix for both.
    with pytest.raises(AssertionError, match="sync check"):
        isolated(_train_with_two_matrices, model, str(tmp_path / "other"), True)


# Stop strings --------------------------------------------------------------------------------------------------------


def _train_with_stop(model: str, folder: str) -> dict[str, Any]:
    """The answers of a run that stops at a string, and what it logs of them."""
    answers: list[list[int]] = []
    trainer = make_trainer(model, Path(folder), max_steps=1, generation_kwargs={"stop": ["#"]})
    generate = trainer.vllm_generation.generate

    def kept(*args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        answers.extend(result[1])
        return result

    trainer.vllm_generation.generate = kept
    trainer.train()
    return {"answers": answers, "log": trainer.state.log_history[0]}


def test_answers_that_ended_on_a_stop_string_are_not_counted_as_cut_off(tmp_path):
    run = isolated(_train_with_stop, save_model(tmp_path / "model"), str(tmp_path / "run"))

    tokenizer = make_tokenizer()
    # A padding token counts as an end for TRL, too.
    stop, end, pad = tokenizer.convert_tokens_to_ids(["#", EOS_OF_FILES, "<pad>"])
    lengths_of_ended = []
    at_stop = 0
    for tokens in run["answers"]:
        if tokens[-1] in (stop, end, pad):
            lengths_of_ended.append(len(tokens))
        at_stop += tokens[-1] == stop

    ended = len(lengths_of_ended)
    assert run["log"]["completions/clipped_ratio"] == pytest.approx(1 - ended / len(run["answers"]))
    assert run["log"]["completions/mean_terminated_length"] == pytest.approx(sum(lengths_of_ended) / ended)
    # Control: TRL counts fewer.
    assert at_stop > 0
