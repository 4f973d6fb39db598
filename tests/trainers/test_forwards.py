"""`qarl_trl.trainers.forwards`: low-bit weights are those in place, whoever runs the model."""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
from peft import LoraConfig
from quant.test_store import is_low_bit_form_of
from slow.toys import distinct_characters, prompts, save_model
from toy_runs import without_engine
from transformers import TrainerCallback

from qarl_trl import (
    LowBitDistillationConfig,
    LowBitDistillationTrainer,
    LowBitSFTConfig,
    LowBitSFTTrainer,
    QaRLConfig,
    QaRLTrainer,
)
from qarl_trl.quant import low_bit_store
from qarl_trl.trainers.forwards import ForwardGuard
from trainers.runs import settings
from trainers.test_low_bit import data_of


IDS = torch.arange(2, 18)[None]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "model", layers=1)


def loss_of(model):
    with torch.no_grad():
        return model(input_ids=IDS, labels=IDS).loss.item()


def put(weights, model):
    """As libraries that average weights do it: without a trace."""
    for weight, parameter in zip(weights, model.parameters(), strict=True):
        parameter.data.copy_(weight)


class ScoresFirst(TrainerCallback):
    """Runs the model with its first weights at an event of each step, and then with its own."""

    def __init__(self, event, is_rounded_anew):
        self.losses = []
        self.is_rounded_anew = is_rounded_anew
        setattr(self, event, self.score)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.first = [parameter.detach().clone() / 2 for parameter in model.parameters()]

    def score(self, args, state, control, model=None, **kwargs):
        now = [parameter.detach().clone() for parameter in model.parameters()]
        # Twice, as a text is generated.
        for weights in (now, self.first, self.first):
            put(weights, model)
            if self.is_rounded_anew:
                low_bit_store(model).forget()
            self.losses.append(loss_of(model))
        put(now, model)


class DoesNothing(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        pass


def train(model, folder, *callbacks):
    args = QaRLConfig(
        **without_engine(
            folder,
            max_steps=2,
            gradient_accumulation_steps=2,
            steps_per_generation=2,
            max_completion_length=4,
            learning_rate=1e-2,
            eval_strategy="steps",
            eval_steps=1,
            per_device_eval_batch_size=4,
        )
    )
    data = {"train_dataset": prompts(8), "eval_dataset": prompts(2)}
    trainer = QaRLTrainer(model, distinct_characters, args, callbacks=list(callbacks), **data)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "event", ["on_step_begin", "on_substep_end", "on_step_end", "on_prediction_step", "on_evaluate"]
)
def test_a_callback_that_runs_the_model_with_other_weights_gets_their_low_bits(model, tmp_path, event):
    scores = ScoresFirst(event, is_rounded_anew=False)
    trainer = train(model, tmp_path / "a", scores)
    right = ScoresFirst(event, is_rounded_anew=True)
    train(model, tmp_path / "b", right)

    assert scores.losses == right.losses
    # Control: the weights differ, and so do their losses.
    assert len(set(scores.losses[:2])) == 2
    # The run goes on as without: it trains on no low bits of the first weights.
    # In the same passes: beside a callback at the end of a substep none are shared.
    others = [DoesNothing()] if event == "on_substep_end" else []
    alone = train(model, tmp_path / "c", *others)
    for one, other in zip(trainer.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)


def distance_to_half(trainer, model, inputs):
    """A loss with a second forward, of half the weights."""
    student = model(input_ids=inputs["input_ids"]).logits
    now = [parameter.detach().clone() for parameter in model.parameters()]
    put([weight / 2 for weight in now], model)
    if trainer.is_rounded_anew:
        trainer.low_bit_store.forget()
    with torch.no_grad():
        teacher = model(input_ids=inputs["input_ids"]).logits
    put(now, model)
    if trainer.is_rounded_anew:
        trainer.low_bit_store.forget()
    trainer.distances += ((student - teacher).abs().max().item(),)
    return (student - teacher).pow(2).mean()


class MeanTeacher(LowBitSFTTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return distance_to_half(self, model, inputs)


class MeanTeacherStep(LowBitSFTTrainer):
    def training_step(self, model, inputs, *args, **kwargs):
        loss = distance_to_half(self, model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


def loss_of_partial(trainer, model, inputs, *args, **kwargs):
    """With the trainer bound by a `partial`."""
    return distance_to_half(trainer, model, inputs)


def wrapped_loss(trainer):
    """As scripts replace a method."""

    @functools.wraps(trainer.compute_loss)
    def compute_loss(model, inputs, *args, **kwargs):
        return distance_to_half(trainer, model, inputs)

    return compute_loss


@pytest.mark.parametrize("how", ["compute_loss", "training_step", "wrapped", "partial"])
def test_a_loss_that_runs_the_model_with_other_weights_gets_their_low_bits(model, tmp_path, how):
    kinds = {"compute_loss": MeanTeacher, "training_step": MeanTeacherStep}
    trainers = []
    for checkpointing, is_rounded_anew in [(False, False), (True, False), (False, True)]:
        changes = {"max_steps": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": checkpointing}
        args = LowBitSFTConfig(**settings(tmp_path / f"{checkpointing}-{is_rounded_anew}", **changes))
        trainer = kinds.get(how, LowBitSFTTrainer)(model, args=args, **data_of("sft", model))
        trainer.is_rounded_anew = is_rounded_anew
        trainer.distances = ()
        if how == "wrapped":
            trainer.compute_loss = wrapped_loss(trainer)
        elif how == "partial":
            trainer.compute_loss = functools.partial(loss_of_partial, trainer)
        trainer.train()
        trainers.append(trainer)

    # With the low bits of the student, the teacher was nearer: embeddings and norms alone were its own.
    usual, with_checkpointing, anew = trainers
    assert usual.distances == with_checkpointing.distances == anew.distances

    # A backward that computes layers again has the student's weights, too.
    for trainer in (with_checkpointing, anew):
        for one, other in zip(trainer.model.parameters(), usual.model.parameters(), strict=True):
            assert torch.equal(one, other)


@contextlib.contextmanager
def halved(model, is_rounded_anew):
    """Half the weights, as a script puts them in place."""
    now = [parameter.detach().clone() for parameter in model.parameters()]
    put([weight / 2 for weight in now], model)
    if is_rounded_anew:
        low_bit_store(model).forget()
    yield
    put(now, model)
    if is_rounded_anew:
        low_bit_store(model).forget()


@pytest.mark.parametrize("with_adapter", [False, True])
def test_a_loss_of_a_distillation_that_runs_the_backbone_with_other_weights_gets_their_low_bits(
    model, tmp_path, with_adapter
):
    """TRL's distillation never calls the whole model."""
    distances = {}

    def run(is_rounded_anew):
        class Compares(LowBitDistillationTrainer):
            def _compute_loss(self, student, inputs, *args):
                loss = super()._compute_loss(student, inputs, *args)
                rows = (IDS, torch.ones_like(IDS), 8)
                with torch.no_grad():
                    own = self._get_last_hidden_state(student, *rows)
                    with halved(student, is_rounded_anew):
                        other = self._get_last_hidden_state(student, *rows)
                distances[is_rounded_anew] = (own - other).norm().item()
                return loss

        changes = {"max_steps": 1, "max_completion_length": 4, "use_vllm": False}
        args = LowBitDistillationConfig(**settings(tmp_path / str(is_rounded_anew), **changes))
        adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        more = {"peft_config": adapter} if with_adapter else {}
        Compares(model, args=args, teacher_model=model, train_dataset=prompts(), **more).train()

    run(is_rounded_anew=True)
    run(is_rounded_anew=False)

    assert distances[False] == distances[True]


def test_a_loss_that_sft_is_given_as_an_argument_gets_the_low_bits_of_other_weights(model, tmp_path):
    trainers = []
    distances = {}

    def run(is_rounded_anew):
        def loss(outputs, labels, num_items_in_batch=None):
            policy = trainers[-1].model
            with torch.no_grad():
                own = policy(input_ids=IDS).logits
                with halved(policy, is_rounded_anew):
                    other = policy(input_ids=IDS).logits
            distances[is_rounded_anew] = (own - other).abs().max().item()
            return outputs.logits.pow(2).mean()

        args = LowBitSFTConfig(**settings(tmp_path / str(is_rounded_anew), max_steps=1))
        trainers.append(LowBitSFTTrainer(model, args=args, compute_loss_func=loss, **data_of("sft", model)))
        trainers[-1].train()

    run(is_rounded_anew=True)
    run(is_rounded_anew=False)

    assert distances[False] == distances[True]


def test_a_compiled_model_gets_the_low_bits_of_other_weights(model, tmp_path):
    distances = {}

    def run(is_rounded_anew):
        class Compares(QaRLTrainer):
            def _compute_loss(self, policy, inputs):
                loss = super()._compute_loss(policy, inputs)
                with torch.no_grad():
                    own = self.model(input_ids=IDS).logits
                    with halved(self._unwrapped, is_rounded_anew):
                        other = self.model(input_ids=IDS).logits
                distances[is_rounded_anew] = (own - other).abs().max().item()
                return loss

        # The backend compiles nothing: TorchDynamo, which would skip what it does not trace, is the same.
        compiled = {"torch_compile": True, "torch_compile_backend": "eager", "max_tokens_per_pass": None}
        folder = tmp_path / str(is_rounded_anew)
        args = QaRLConfig(**without_engine(folder, max_steps=1, max_completion_length=4, loss_type="grpo", **compiled))
        Compares(model, distinct_characters, args, train_dataset=prompts(8)).train()

    run(is_rounded_anew=True)
    run(is_rounded_anew=False)

    assert distances[False] == distances[True]


class WritesBetweenMicroBatches(TrainerCallback):
    """Doubles a weight after the first micro-batch of a step, without a trace."""

    def __init__(self, layer):
        self.layer = layer
        self.is_seen = []

    def on_substep_end(self, args, state, control, **kwargs):
        self.layer.weight.data.mul_(2)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        # What the last micro-batch had.
        (kept,) = (low_bit for name, low_bit in self.layer.store.kept().items() if "layers.0.mlp.up_proj" in name)
        self.is_seen.append(is_low_bit_form_of(kept, self.layer.weight))


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_micro_batch_sees_what_a_callback_wrote_before_it(model, tmp_path, is_trained):
    args = LowBitSFTConfig(**settings(tmp_path / "run", max_steps=2, gradient_accumulation_steps=2))
    trainer = LowBitSFTTrainer(model, args=args, **data_of("sft", model))
    layer = trainer.model.model.layers[0].mlp.up_proj
    layer.weight.requires_grad_(is_trained)
    writes = WritesBetweenMicroBatches(layer)
    trainer.add_callback(writes)

    trainer.train()

    assert writes.is_seen == [True, True]


def test_a_copied_or_stored_model_does_not_know_the_trainer(model, tmp_path):
    trainer = train(model, tmp_path)
    expected = loss_of(trainer.model)

    assert loss_of(copy.deepcopy(trainer.model)) == expected
    guard = pickle.loads(pickle.dumps(ForwardGuard(trainer.low_bit_store).before)).__self__
    assert guard._store is None


class WritesToUntrained(TrainerCallback):
    """Doubles a weight that nobody trains when a step begins, without a trace."""

    def __init__(self, layer, at):
        self.layer = layer
        self.at = at
        self.is_seen = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.at:
            self.layer.weight.data.mul_(2)

    def on_step_end(self, args, state, control, **kwargs):
        self.is_seen.append(is_low_bit_form_of(self.layer.low_bit(), self.layer.weight))


class RunsModel(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        loss_of(model)


@pytest.mark.parametrize("at", [0, 1])
def test_a_step_sees_what_a_callback_writes_to_untrained_weights_at_its_beginning(model, tmp_path, at):
    args = LowBitSFTConfig(**settings(tmp_path / "run", max_steps=2))
    trainer = LowBitSFTTrainer(model, args=args, **data_of("sft", model))
    layer = trainer.model.model.layers[0].mlp.up_proj
    layer.weight.requires_grad_(False)
    writes = WritesToUntrained(layer, at)
    # Low-bit weights are there when the first step begins, as after an evaluation.
    trainer.add_callback(RunsModel())
    trainer.add_callback(writes)

    trainer.train()

    assert writes.is_seen == [True, True]
