"""`QaRLTrainer` without an engine: TRL's trainer when everything is off, and loud when a hook of it is lost."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest
import references
import torch
from learner.test_features import Gradients, rollout
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from slow.toys import distinct_characters, logged, prompts, stored_tensors
from toy_runs import OFF, adapter, changed, make, master_weights, stock_config, train, without_engine
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.checkpoints.rollout_buffer import RolloutBuffer
from qarl_trl.quant import quantized_modules
from qarl_trl.quant.gemms import gemm
from qarl_trl.quant.quantize import quantize_weight
from qarl_trl.train import train as train_by_command
from qarl_trl.trainers.forwards import ForwardGuard
from qarl_trl.trainers.loading import load_stored, load_whole


def test_a_run_that_ends_without_an_update_is_an_error(dense_model, tmp_path):
    """A stream without rows, which nobody could count before. The Trainer alone returns as after any other run."""
    empty = prompts(8).to_iterable_dataset().filter(lambda row: False)
    args = QaRLConfig(**without_engine(tmp_path, max_steps=2))
    trainer = QaRLTrainer(dense_model, distinct_characters, args, train_dataset=empty)

    # With the model saved, whoever looks at the folder takes it for one that was trained.
    # A text as the exit code: Python prints it and exits with 1.
    with pytest.raises(SystemExit, match="^qarl-trl train: .* without an update") as stopped:
        train_by_command(trainer, "data")

    assert isinstance(stopped.value.__cause__, RuntimeError)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"quantization_config": object()}, ValueError, "quantization_config"),
        ({"args": GRPOConfig("x", use_cpu=True, bf16=False)}, TypeError, "QaRLConfig"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_a_model_loads(tmp_path, arguments, error, words):
    arguments = {"args": QaRLConfig(str(tmp_path), use_cpu=True, bf16=False)} | arguments

    with pytest.raises(error, match=words):
        QaRLTrainer("no/such-model", distinct_characters, train_dataset=prompts(), **arguments)


def test_a_checkpoint_that_lacks_a_weight_is_no_start(dense_model, tmp_path):
    lacking = tmp_path / "lacking"
    shutil.copytree(dense_model, lacking)
    weights = stored_tensors(lacking)
    del weights["model.layers.0.mlp.down_proj.weight"]
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ValueError, match=r"lacking lacks 1 weights of its model, first model.*down_proj"):
        make(str(lacking), tmp_path / "run")

    # Control: TRL alone trains it, with random numbers in their place.
    GRPOTrainer(str(lacking), distinct_characters, stock_config(tmp_path / "trl"), train_dataset=prompts())


def test_a_reward_model_may_get_a_new_head(dense_model, tmp_path):
    """TRL's trainer of reward models names the class."""
    args = QaRLConfig(**without_engine(tmp_path))

    model = load_whole(args, dense_model, AutoModelForSequenceClassification, num_labels=1)

    assert model.score.weight.shape[0] == 1

    # What loads stored tensors knows no head that none of them has.
    with pytest.raises(ValueError, match="A reward model must start from a checkpoint in high precision with lora_b"):
        load_stored(dense_model, AutoModelForSequenceClassification, num_labels=1)


class NoisyRollouts(QaRLTrainer):
    """Samples with noise on its weights, written past autograd as in many a loop, and trains without."""

    # The layers whose loss forward multiplied by other weights than its own.
    stale: set[str] = set()

    def _generate_and_score_completions(self, inputs):
        weights = [parameter for name, parameter in self.model.named_parameters() if "proj" in name]
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.data.add_(0.05 * torch.randn_like(weight))

        output = super()._generate_and_score_completions(inputs)
        for weight, stored in zip(weights, before, strict=True):
            weight.data.copy_(stored)
        return output

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        for name, layer in quantized_modules(self.model):
            used = layer.low_bit().quantized
            if not torch.equal(used, quantize_weight(layer.weight.detach(), layer.scheme).quantized):
                self.stale = self.stale | {name}
        return loss


def test_weights_that_a_subclass_samples_with_are_not_those_of_the_loss(dense_model, tmp_path, monkeypatch):
    def stale(folder: str) -> set[str]:
        args = QaRLConfig(**without_engine(tmp_path / folder, steps_per_generation=2, max_steps=2))
        trainer = NoisyRollouts(dense_model, distinct_characters, args, train_dataset=prompts())
        trainer.train()
        return trainer.stale

    assert not stale("told")
    # Control: nobody tells the owner of the low-bit weights, nor looks at the weights.
    monkeypatch.setattr(RolloutBuffer, "micro_batches", None)
    monkeypatch.setattr(ForwardGuard, "before", lambda *_: None)
    monkeypatch.setattr(ForwardGuard, "after", lambda *_: None)
    assert len(stale("untold")) == 7


@contextmanager
def noise_on(model):
    """Noise on the weights in the block, written past autograd."""
    weights = [parameter for name, parameter in model.named_parameters() if "proj" in name]
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.data.add_(0.05 * torch.randn_like(weight))
    yield
    for weight, stored in zip(weights, before, strict=True):
        weight.data.copy_(stored)


def noisy_rollout(texts, trainer):
    # The prompts have one length.
    ids = [trainer.processing_class(text)["input_ids"] for text in texts]
    with noise_on(trainer.model), torch.no_grad():
        output = trainer.model.generate(torch.tensor(ids), do_sample=True, max_new_tokens=8, min_new_tokens=8)
    return {"prompt_ids": ids, "completion_ids": output[:, len(ids[0]) :].tolist(), "logprobs": None}


class NoisyGeneration(QaRLTrainer):
    def _generate(self, prompts):
        with noise_on(self.model):
            return super()._generate(prompts)


@pytest.mark.parametrize("how", ["rollout_func", "subclass"])
def test_after_a_rollout_with_other_weights_old_is_scored_with_those_of_the_run(dense_model, tmp_path, how):
    trainer_class = NoisyGeneration if how == "subclass" else QaRLTrainer
    rollout_func = noisy_rollout if how == "rollout_func" else None
    # The layers with other weights than their own in the forward of `old`, after which rewards are asked.
    stale: set[str] = set()

    def reward(completions, **_):
        for name, layer in quantized_modules(trainer.model):
            used = layer.low_bit().quantized
            if not torch.equal(used, quantize_weight(layer.weight.detach(), layer.scheme).quantized):
                stale.add(name)
        return distinct_characters(completions)

    args = QaRLConfig(**without_engine(tmp_path, steps_per_generation=2, max_steps=2))
    data = {"train_dataset": prompts(), "rollout_func": rollout_func}
    trainer = trainer_class(dense_model, reward, args, **data)
    trainer.train()

    assert not stale
    # No update came in between.
    assert logged(trainer, "ratio/min")[0] == pytest.approx(1, abs=1e-6)
    assert logged(trainer, "ratio/max")[0] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("of", ["another model", "the base", "the model", "a part", "the adapter"])
def test_an_optimizer_of_another_model_is_said(dense_model, tmp_path, caplog, of):
    loaded = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float32)
    if of == "the adapter":
        loaded = get_peft_model(loaded, adapter())
    parameters = list(loaded.lm_head.parameters()) if of == "a part" else list(loaded.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    args = QaRLConfig(**without_engine(tmp_path, max_steps=1))
    model = dense_model if of == "another model" else loaded
    # The trainer makes it, and freezes the base.
    peft_config = adapter() if of == "the base" else None
    data = {"train_dataset": prompts(), "peft_config": peft_config, "optimizers": (optimizer, None)}
    trainer = QaRLTrainer(model, distinct_characters, args, **data)
    before = master_weights(trainer)
    trainer.train()

    is_said = "none of the parameters that the model trains" in caplog.text
    assert is_said == (not changed(before, master_weights(trainer)))
    assert is_said == (of in ("another model", "the base"))


# Data and rewards ---------------------------------------------------------------------------------------------------


def test_a_streamed_data_set_trains_as_the_same_one_in_memory(dense_model, tmp_path):
    args = QaRLConfig(**without_engine(tmp_path / "a", shuffle_dataset=False))
    streamed = QaRLTrainer(dense_model, distinct_characters, args, train_dataset=prompts().to_iterable_dataset())
    streamed_losses = train(streamed)

    in_memory = make(dense_model, tmp_path / "b", shuffle_dataset=False)
    losses = train(in_memory)

    assert losses == streamed_losses
    assert not changed(master_weights(in_memory), master_weights(streamed))
    # Control: the order of the rows matters.
    assert train(make(dense_model, tmp_path / "c", shuffle_dataset=True)) != losses


def test_several_rewards_are_added_by_their_weights(dense_model, tmp_path):
    def longest_run(completions, **_):
        return [float(max(map(completion.count, completion), default=0)) for completion in completions]

    settings = without_engine(tmp_path / "a", reward_weights=[1.0, -0.5])
    rewards = [distinct_characters, longest_run]
    both = QaRLTrainer(dense_model, rewards, QaRLConfig(**settings), train_dataset=prompts())
    both_losses = train(both)

    def added(completions, **_):
        parts = zip(distinct_characters(completions), longest_run(completions), strict=True)
        return [first - 0.5 * second for first, second in parts]

    one = QaRLTrainer(dense_model, added, QaRLConfig(**without_engine(tmp_path / "b")), train_dataset=prompts())

    assert train(one) == both_losses
    assert logged(one, "reward") == pytest.approx(logged(both, "reward"))
    # Control: the second one counts.
    assert train(make(dense_model, tmp_path / "c")) != both_losses


@pytest.mark.parametrize("where", ["reward", "rollout_func"])
def test_a_policy_that_users_code_leaves_in_evaluation_trains_as_before(dense_model, tmp_path, where):
    """A reward that asks the policy does. TRL would weigh the next micro-batch as a whole update."""

    def run(folder, leaves_evaluation):
        def evaluate(at):
            if leaves_evaluation and at == where:
                trainer.model.eval()

        def reward(completions, **_):
            evaluate("reward")
            return distinct_characters(completions)

        def sample(*arguments):
            evaluate("rollout_func")
            return rollout(*arguments, tools=False, ends=True)

        changes = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 2, "loss_type": "grpo"}
        args = QaRLConfig(**without_engine(tmp_path / folder, **changes))
        data = {"train_dataset": prompts(), "rollout_func": sample if where == "rollout_func" else None}
        trainer = QaRLTrainer(dense_model, reward, args, **data)
        trainer.train()
        return trainer

    usual = run("a", leaves_evaluation=False)
    left = run("b", leaves_evaluation=True)

    assert not changed(master_weights(usual), master_weights(left))
    assert logged(left, "loss") == logged(usual, "loss")
    assert logged(left, "reward") == logged(usual, "reward")


def test_an_evaluation_stays_one_if_a_reward_trains_the_policy(dense_model, tmp_path):
    """The other way round: what is evaluated after it would count as training."""

    def reward(completions, **_):
        trainer.model.train()
        return distinct_characters(completions)

    args = QaRLConfig(**without_engine(tmp_path, per_device_eval_batch_size=4, num_generations=2))
    trainer = QaRLTrainer(dense_model, reward, args, train_dataset=prompts(), eval_dataset=prompts(4))

    metrics = trainer.evaluate()

    assert "eval_completions/mean_length" in metrics
    assert not trainer.model.training


def test_rewards_of_one_name_are_logged_apart(dense_model, tmp_path):
    def times(factor):
        def reward(completions, **_):
            return [factor * number for number in distinct_characters(completions)]

        return reward

    args = QaRLConfig(**without_engine(tmp_path, max_steps=1))
    trainer = QaRLTrainer(dense_model, [times(1.0), times(100.0)], args, train_dataset=prompts())
    trainer.train()

    first, second = logged(trainer, "rewards/reward/mean")[0], logged(trainer, "rewards/reward_2/mean")[0]
    assert first > 0
    assert second == pytest.approx(100 * first)
    # Control: together they are the reward that trains.
    assert first + second == pytest.approx(logged(trainer, "reward")[0])


def test_a_first_batch_of_cut_answers_alone_is_said(dense_model, tmp_path, caplog):
    changes = {"max_steps": 1, "max_completion_length": 2, "mask_truncated_completions": True}
    make(dense_model, tmp_path / "a", **changes).train()
    assert "all answers were cut off at max_completion_length=2" in caplog.text

    # Control: cut answers that train.
    caplog.clear()
    make(dense_model, tmp_path / "b", **changes | {"mask_truncated_completions": False}).train()
    assert "cut off" not in caplog.text


def test_a_prediction_has_its_own_rewards_and_none_is_left_for_the_next_evaluation(dense_model, tmp_path):
    """transformers' `predict` logs nothing, and TRL keeps rewards until something is logged."""

    def value_of(completions, value, **_):
        return value

    def data(value):
        return prompts().add_column("value", [value] * len(prompts()))

    args = QaRLConfig(**without_engine(tmp_path))
    trainer = QaRLTrainer(dense_model, value_of, args, train_dataset=data(1.0), eval_dataset=data(1.0))

    assert trainer.predict(data(0.0)).metrics["test_reward"] == 0.0
    assert trainer.predict(data(0.5), metric_key_prefix="half").metrics["half_reward"] == 0.5
    assert trainer.evaluate()["eval_reward"] == 1.0

    # Control: TRL's alone has all three in one.
    stock = GRPOTrainer(dense_model, value_of, stock_config(tmp_path / "trl"), train_dataset=data(1.0))
    assert "test_reward" not in stock.predict(data(0.0)).metrics
    assert stock.evaluate(data(1.0))["eval_reward"] == 0.5


def test_a_prediction_has_the_extremes_of_its_batches_as_an_evaluation_has(dense_model, tmp_path):
    trainer = make(dense_model, tmp_path, per_device_eval_batch_size=4)
    values = {"ratio/min": [], "mismatch/logp_diff_max": []}
    score = trainer._generate_and_score_completions

    def with_metrics(inputs):
        output = score(inputs)
        for name, of_batches in values.items():
            of_batches.append(float(len(of_batches)))
            trainer._log_value(name, of_batches[-1])
        return output

    trainer._generate_and_score_completions = with_metrics
    rows = trainer.train_dataset.select(range(2))
    evaluated = trainer.evaluate(rows)
    batches = len(values["ratio/min"])
    assert batches > 1  # control
    for of_batches in values.values():
        of_batches.clear()

    predicted = trainer.predict(rows).metrics

    assert len(values["ratio/min"]) == batches
    assert predicted["test_ratio/min"] == evaluated["eval_ratio/min"] == 0.0
    assert predicted["test_mismatch/logp_diff_max"] == evaluated["eval_mismatch/logp_diff_max"] == batches - 1


def test_settings_that_a_second_call_does_not_take_are_said(dense_model, tmp_path, caplog):
    trainer = make(dense_model, tmp_path, max_steps=1)
    rate = trainer.args.learning_rate

    def said_of_call(learning_rate):
        caplog.clear()
        trainer.args.learning_rate = learning_rate
        trainer.train()
        return "do not count" in caplog.text

    # Before there is an optimizer it counts.
    assert not said_of_call(rate / 4)
    assert not said_of_call(rate / 4)
    assert said_of_call(rate / 2)
    assert f"these do not count: learning_rate {rate / 4} -> {rate / 2}" in caplog.text

    # As the message says; and the next call compares with what this optimizer was made with.
    trainer.optimizer = None
    assert not said_of_call(rate / 2)
    assert trainer.optimizer.param_groups[0]["initial_lr"] == rate / 2
    assert not said_of_call(rate / 2)


def test_trained_weights_in_16_bits_are_said(dense_model, tmp_path, caplog):
    def warned(folder, model=dense_model, **changes):
        caplog.clear()
        make(model, tmp_path / folder, **changes)
        return "trained parameters are torch.bfloat16" in caplog.text

    loaded = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.bfloat16)
    assert warned("a", loaded)
    assert warned("b", model_init_kwargs={"dtype": "bfloat16"})

    # Controls: TRL's default for a name, and an adapter in float32 on a base that nothing trains.
    assert not warned("c")
    assert not warned("d", model_init_kwargs={"dtype": "bfloat16"}, peft_config=adapter())


def test_an_optimizer_of_the_user_and_muon_are_refused(dense_model, tmp_path):
    args = QaRLConfig(**without_engine(tmp_path, optim_muon=True))
    model = AutoModelForCausalLM.from_pretrained(dense_model)
    adamw = torch.optim.AdamW(model.parameters())

    with pytest.raises(ValueError, match="optim_muon must be False beside an optimizer"):
        QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(), optimizers=(adamw, None))
    # Control.
    args.optim_muon = False
    QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(), optimizers=(adamw, None))


@pytest.mark.parametrize("with_adapter", [False, True])
def test_a_reward_model_scores_in_high_precision(dense_model, tmp_path, with_adapter):
    """Its layers and its head are of no engine's concern: only the policy is quantized."""
    config = AutoConfig.from_pretrained(dense_model, num_labels=1, pad_token_id=0)
    reward_model = AutoModelForSequenceClassification.from_config(config)
    if with_adapter:
        reward_model.save_pretrained(tmp_path / "base")
        AutoTokenizer.from_pretrained(dense_model).save_pretrained(tmp_path / "base")
        reward_model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
        reward_model = get_peft_model(reward_model, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    reward_model.save_pretrained(tmp_path / "reward")
    AutoTokenizer.from_pretrained(dense_model).save_pretrained(tmp_path / "reward")

    args = QaRLConfig(**without_engine(tmp_path / "run"))
    trainer = QaRLTrainer(dense_model, str(tmp_path / "reward"), args, train_dataset=prompts())
    train(trainer)

    assert any(quantized_modules(trainer.model))
    assert not any(quantized_modules(trainer.reward_funcs[0]))
    # It tells completions apart.
    assert any(logged(trainer, "reward_std"))


def test_the_tags_are_those_of_the_loss_or_of_a_subclass(dense_model, tmp_path):
    class Tagged(QaRLTrainer):
        _tag_names = ["trl", "mine"]

    def tags_of(trainer_class, loss_type):
        args = QaRLConfig(**without_engine(tmp_path / loss_type, loss_type=loss_type))
        return trainer_class(dense_model, distinct_characters, args, train_dataset=prompts()).model.model_tags

    assert set(tags_of(QaRLTrainer, "tbpo")) == {"trl", "tbpo", "qarl"}
    assert set(tags_of(QaRLTrainer, "grpo")) == {"trl", "grpo", "qarl"}
    assert set(tags_of(Tagged, "tbpo")) == {"trl", "mine"}


class OfTokens:
    """A subclass that gives each token an advantage of its own, as TRL's losses allow: less, the later it comes."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        later = torch.arange(output["completion_mask"].shape[1])
        return output | {"advantages": output["advantages"].unsqueeze(1) * 0.5**later}


class StockOfTokens(OfTokens, GRPOTrainer):
    """TRL's trainer, with them."""


class QaRLOfTokens(OfTokens, QaRLTrainer):
    """Ours, with them."""


def test_advantages_of_tokens_train_as_in_trl(dense_model, tmp_path):
    args = stock_config(tmp_path / "a", loss_type="dapo")
    stock = train(StockOfTokens(dense_model, distinct_characters, args, train_dataset=prompts()))

    args = QaRLConfig(**without_engine(tmp_path / "b", loss_type="dapo", **OFF))
    ours = QaRLOfTokens(dense_model, distinct_characters, args, train_dataset=prompts())
    assert train(ours) == stock
    # The metrics go by the mean of each completion, some of which are below 0.
    assert ours.state.log_history[0]["ratio/neg_q50"] == 1

    # Control: one advantage for a completion.
    assert train(make(dense_model, tmp_path / "c", loss_type="dapo", **OFF)) != stock


def test_advantages_of_tokens_are_refused_by_tbpo(dense_model, tmp_path):
    # As many completions as tokens: the shapes would fit, and the numbers would not.
    args = QaRLConfig(**without_engine(tmp_path, max_completion_length=4))
    trainer = QaRLOfTokens(dense_model, distinct_characters, args, train_dataset=prompts())

    with pytest.raises(ValueError, match=r"must be one number a completion, got the shape \(4, 4\)"):
        trainer.train()


# With the scheme off: TRL's trainer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_with_the_scheme_off_losses_and_weights_are_those_of_trl_bit_for_bit(dense_model, tmp_path, loss_type):
    # The oracle. Both draw their samples from torch's global generator, one run after the other.
    args = stock_config(tmp_path / "a", loss_type=loss_type)
    stock = GRPOTrainer(dense_model, distinct_characters, args, train_dataset=prompts())
    stock_losses = train(stock)

    # Its constructor seeds the generator again, so it must come after the other run.
    ours = make(dense_model, tmp_path / "b", loss_type=loss_type, **OFF)
    our_losses = train(ours)

    assert our_losses == stock_losses
    assert not changed(master_weights(stock), master_weights(ours))


def test_the_comparison_with_trl_notices_quantization(dense_model, tmp_path):
    """Control of the test above."""
    off = train(make(dense_model, tmp_path / "a", quant_scheme=None, loss_type="grpo"))
    on = train(make(dense_model, tmp_path / "b", quant_scheme="W4A16", loss_type="grpo"))

    assert on != off


def test_kept_matrices_change_no_bit_of_a_training_and_save_most_dequantizing(dense_model, tmp_path, monkeypatch):
    dequantized = []
    new_matrix_from = gemm.Gemm.new_matrix_from

    def counted(self, weight, dtype):
        dequantized.append(dtype)
        return new_matrix_from(self, weight, dtype)

    monkeypatch.setattr(gemm.Gemm, "new_matrix_from", counted)
    again = make(dense_model, tmp_path / "a")
    # Not by `train`, whose spy is a loss of a user's: weights would be looked at before each forward.
    again.train()
    times_again = len(dequantized)

    dequantized.clear()
    keeping = make(dense_model, tmp_path / "b", quant_keep_matrices=True)
    keeping.train()
    assert logged(keeping, "loss") == logged(again, "loss")

    assert not changed(master_weights(again), master_weights(keeping))
    # Once for each layer after each of the optimizer's steps.
    layers = len(list(quantized_modules(keeping.model)))
    assert len(dequantized) == layers * keeping.state.global_step
    # Control: without the setting a backward does it again.
    assert times_again > 1.9 * len(dequantized)


def test_positive_only_is_trl_with_negative_advantages_at_zero(dense_model, tmp_path):
    class PositiveOnly(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            kept = references.positive_advantages(output["advantages"].tolist())
            return output | {"advantages": torch.tensor(kept)}

    args = stock_config(tmp_path / "a", loss_type="grpo")
    expected = train(PositiveOnly(dense_model, distinct_characters, args, train_dataset=prompts()))

    positive = make(dense_model, tmp_path / "b", advantage_filter="positive", loss_type="grpo", **OFF)
    assert train(positive) == expected
    # What `log_completions` shows.
    assert min(positive._logs["advantages"]) == 0

    control = make(dense_model, tmp_path / "c", loss_type="grpo", **OFF)
    assert train(control) != expected
    assert min(control._logs["advantages"]) < 0


def scored_rollout(texts: list[str], trainer: GRPOTrainer) -> dict:
    """`test_features.rollout` with log-probs of the sampler, one of which it does not have."""
    completions = rollout(texts, trainer, tools=False, ends=True)
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    logps = []
    for ids in completions["completion_ids"]:
        logps.append((-3 * torch.rand(len(ids), generator=generator)).tolist())

    # Of which TRL makes NaN.
    logps[0][0] = None
    return completions | {"logprobs": logps}


def mean_logp_diff(batches: list[tuple[torch.Tensor, dict]], padding: bool = False) -> float:
    """Mean of abs(learner - sampler) over the tokens of micro-batches, given with their current log-probs."""
    differences = []
    for logps, inputs in batches:
        learner = inputs.get("old_per_token_logps", logps)
        # NaN where the sampler has none, and any number in the padding.
        difference = (learner - inputs["sampling_per_token_logps"]).abs()
        counted = inputs["completion_mask"].bool() | padding
        differences.append(difference[~difference.isnan() & counted])
    return torch.cat(differences).mean().item()


# The data and the sampler of both trainers.
SCORED = {"train_dataset": prompts(), "rollout_func": scored_rollout}


def without_correction(updates: int) -> dict:
    """Settings in which the sampler's log-probs have no weight in the loss."""
    return {"loss_type": "grpo", "steps_per_generation": updates, "vllm_importance_sampling_correction": False}


@pytest.fixture
def trainer_with_sampler_logps(dense_model, tmp_path, monkeypatch):
    """Makes our trainer without quantization, which measures the mismatch as beside an engine."""
    monkeypatch.setattr(QaRLTrainer, "_compares_sampler", True)

    def make_ours(updates: int) -> QaRLTrainer:
        args = QaRLConfig(**without_engine(tmp_path / "ours", **without_correction(updates), **OFF))
        return QaRLTrainer(dense_model, distinct_characters, args, **SCORED)

    return make_ours


@pytest.mark.parametrize("updates", [1, 2])
def test_without_a_correction_the_measured_logp_diff_changes_no_bit_of_training(
    trainer_with_sampler_logps, dense_model, tmp_path, updates
):
    """The oracle is TRL, which has no use for the sampler's log-probs then."""
    args = stock_config(tmp_path / "stock", **without_correction(updates))
    stock = GRPOTrainer(dense_model, distinct_characters, args, **SCORED)
    expected = Gradients()
    stock.add_callback(expected)
    stock_losses = train(stock)

    ours = trainer_with_sampler_logps(updates)  # seeds the generator again
    gradients = Gradients()
    ours.add_callback(gradients)
    our_losses = train(ours)

    assert our_losses == stock_losses
    assert len(gradients.seen) == 4
    for step, stock_step in zip(gradients.seen, expected.seen, strict=True):
        assert not changed(stock_step, step)
    assert logged(ours, "mismatch/logp_diff_mean")
    # Control: the oracle measures nothing.
    for row in stock.state.log_history:
        assert "mismatch" not in " ".join(row)


@pytest.mark.parametrize("updates", [1, 2])
def test_without_a_correction_the_logp_diff_is_that_of_all_tokens(trainer_with_sampler_logps, updates):
    """With one update to a rollout batch TRL computes no `old`, and the current log-probs take its place."""
    ours = trainer_with_sampler_logps(updates)
    measured = []
    measure = ours._measure_mismatch

    def spy(logps, inputs):
        measured.append((logps, inputs))
        measure(logps, inputs)

    ours._measure_mismatch = spy
    ours.train()
    values = logged(ours, "mismatch/logp_diff_mean")
    evaluated = ours.evaluate(prompts(8))

    micro_batches_of_training = measured[:4]
    for _, inputs in micro_batches_of_training:
        assert ("old_per_token_logps" in inputs) == (updates > 1)

    expected = []
    with_padding = []
    for start in range(0, 4, updates):
        of_a_rollout = micro_batches_of_training[start : start + updates]
        expected.append(mean_logp_diff(of_a_rollout))
        with_padding.append(mean_logp_diff(of_a_rollout, padding=True))
    # The same float32 numbers, added up in another order.
    assert values == pytest.approx(expected, rel=1e-5)
    # Control: the mask counts.
    assert values != pytest.approx(with_padding, rel=1e-3)
    assert evaluated["eval_mismatch/logp_diff_mean"] > 0


# What another library may take away ---------------------------------------------------------------------------------


def test_a_lost_loss_hook_stops_the_run(dense_model, tmp_path, monkeypatch):
    # As a subclass or a patch of another library may do. TRL's method is the same forward, without what is ours.
    trainer = make(dense_model, tmp_path)
    trls_own = super(QaRLTrainer, trainer)._get_per_token_logps_and_entropies
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", trls_own)

    with pytest.raises(RuntimeError, match="without `_get_per_token_logps_and_entropies`"):
        trainer.train()


def test_a_loss_without_a_forward_does_not_get_the_forward_of_old(dense_model, tmp_path, monkeypatch):
    """`old` is computed right before the loss, by the same method."""

    def without_forward(self, model, inputs):
        return torch.zeros((), requires_grad=True)

    # Control: TRL's own loss makes one.
    make(dense_model, tmp_path / "whole", steps_per_generation=2, max_steps=1).train()

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", without_forward)
    trainer = make(dense_model, tmp_path, steps_per_generation=2)
    with pytest.raises(RuntimeError, match="without `_get_per_token_logps_and_entropies`"):
        trainer.train()


def test_a_bypassed_layer_stops_the_run(dense_model, tmp_path):
    trainer = make(dense_model, tmp_path)
    layer = trainer.model.model.layers[0].mlp.up_proj
    # As a fused kernel would: with the master weight, in high precision.
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight)

    with pytest.raises(RuntimeError, match=r"1 quantized layers did not run.*mlp\.up_proj"):
        trainer.train()


@pytest.mark.parametrize("lora_base", ["frozen", "merged"])
def test_a_layer_that_only_the_loss_bypasses_stops_the_run(dense_model, tmp_path, lora_base):
    """The reference pass runs a layer in low bits without gradients, and nothing in it is trained then."""
    trainer = make(dense_model, tmp_path, adapter(), lora_base=lora_base, beta=0.1)
    block = trainer.model.get_base_model().model.layers[0].mlp
    layer = block.up_proj if lora_base == "frozen" else block.down_proj
    in_low_bits = layer.forward
    passes = []

    def forward(x):
        if not torch.is_grad_enabled():
            passes.append(x)
            return in_low_bits(x)
        return torch.zeros(*x.shape[:-1], layer.out_features, device=x.device, dtype=x.dtype)

    layer.forward = forward
    # A script may run the model before it trains.
    with torch.no_grad():
        trainer.model(torch.tensor([[3, 4, 5]]))

    with pytest.raises(RuntimeError, match=r"1 quantized layers did not run.*mlp\.(up|down)_proj"):
        trainer.train()

    assert len(passes) > 1
    # Control: a layer that the loss runs is not bypassed.
    make(dense_model, tmp_path / "whole", adapter(), lora_base=lora_base, beta=0.1, max_steps=1).train()
