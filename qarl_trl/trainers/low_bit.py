"""`LowBitMixin`: gives any TRL trainer low-bit weights, a low-bit engine, and checkpoints that vLLM loads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from torch import Tensor, nn
from transformers import Trainer
from trl.distributed import DistributedBackend

from .. import guards
from .._compat.construction import bind_arguments, construction, loads_by_name, streams_its_weights, trl_class
from .._compat.rollout_batch import home_of_rewards, ungathered_rewards
from .._compat.sharding import reshard
from .._compat.training_loop import add_first_callback
from .._compat.versions import check_versions
from ..checkpoints.identity import CONFIG, facts_of_loaded, identity_of
from ..checkpoints.resume import resume_path
from ..checkpoints.same_run import warn_of_another_scheme
from ..checkpoints.saving import CheckpointMixin
from ..cpu_exact.arithmetic import choose_arithmetic
from ..export.sharing import SharingMixin
from ..metrics.clock import StepClock, WeightFlips
from ..metrics.columns import distinct_names, merge_micro_batches
from ..quant.digest import with_low_bits
from ..quant.layers.layer import forget_training, outside_training
from ..quant.names import base_model
from ..quant.source import CheckpointSource
from ..quant.store import LowBitStore, find_store
from ..rollout.engine import LowBitVLLMGeneration
from ..rollout.engine_gemm import gemm_choice
from ..validate import check_run
from ..validate.rollouts import shares_engine
from .callbacks import CheckLayers, TellStore
from .engine import build_engine
from .forwards import ForwardGuard, ForwardsMixin, Trust
from .loading import anchor_model, load_stored, load_whole, warn_of_another_reference, warn_of_rounded_weights
from .policy import leave_earlier_run, prepare_policy
from .sampling import check_end_tokens, say_inherited
from .setting_checks import check_order
from .settings import LowBitConfig, anchor_folders
from .shards import ShardsMixin
from .teacher import for_policy_alone
from .user_code import callback_of_user


logger = get_logger(__name__)


class LowBitMixin(ShardsMixin, ForwardsMixin, CheckpointMixin, SharingMixin):
    """
    The low-bit half of a trainer: `class MyTrainer(LowBitMixin, SFTTrainer)`, with a config that has [`LowBitConfig`].

    It quantizes the linear layers of the policy in place. If the trainer samples with vLLM, the engine runs in the
    same scheme and gets the packed tensors at each weight sync, which a check compares with the learner. `save_model`
    writes the low-bit checkpoint, and a resumed run continues bit for bit. With `quant_scheme="none"` it is the TRL
    trainer.

    Args:
        *positional: The arguments of the TRL trainer. Among them must be `model`, and a config with [`LowBitConfig`]
            as `args`.
        **named: The same by name.

    Raises:
        TypeError: if there is no config, or one without [`LowBitConfig`].
        ValueError: if model, settings and machine do not go together; before any weights load, except for end tokens
            that TRL does not know.
        RuntimeError: if TRL built another engine.
    """

    args: Any
    model: Any
    vllm_generation: Any
    _source: CheckpointSource | None  # the quantized checkpoint that the run starts from
    _plan: QuantizationConfig | None  # which layers are quantized, and how
    _weight_flips: WeightFlips  # compares the low-bit weights of two syncs
    _scored_batches: guards.ScoredBatches

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Python would take the trainer's methods in place of these: a run in high precision, without a word.
        check_order(cls, LowBitMixin, Trainer)

    def __init__(self, *positional: Any, **named: Any) -> None:
        check_versions("trl", "compressed-tensors", "vllm")  # peft only with an adapter
        of_trl = trl_class(type(self)).__name__  # refuses a class without a trainer of TRL
        # TRL's trainers have their arguments in different places: `model` and `args` are found by their names.
        arguments = bind_arguments(super().__init__, type(self), positional, named)
        model: Any = arguments["model"]
        args: Any = arguments.get("args")
        # Before any forward: it decides how torch computes in this process.
        if isinstance(args, LowBitConfig) and args.device.type == "cpu":
            choose_arithmetic()

        # What can be refused without a model is refused here.
        if isinstance(args, LowBitConfig) and args.quantized and streams_its_weights(type(self)):
            raise ValueError(
                f"{type(self).__name__} would send its server the weights in high precision, and learn in low bits. "
                "Use QaRLTrainer, or TRL's class itself (docs/other_trainers.md)."
            )
        self._scored_batches = guards.ScoredBatches()
        source = check_run(model, args, arguments)
        self._source = source
        self._plan = args.quant_plan(None if source is None else source.plan())
        # The digest of a model reads files: once, not once in each process.
        self._identity = guards.on_first(args, lambda: identity_of(model, args, self._plan, arguments, of_trl))
        if args.resume_from_checkpoint:  # also a checkpoint of another run
            resume_path(args.resume_from_checkpoint, args, self._identity)
        else:
            warn_of_another_scheme(self._identity, args.model_init_kwargs)

        # After the checks, whose errors have the user's own words.
        anchor_folders(args)
        # By place or by name as they came: a user's constructor may take by name alone what TRL's takes by place.
        by_place = list(positional)
        replaced = {"model": anchor_model(model)}
        if "peft_config" in arguments:
            # peft writes the layers that it chose into the config, by which a script may make another trainer.
            replaced["peft_config"] = copy.deepcopy(arguments["peft_config"])
        for name, argument in replaced.items():
            if name in named:
                named[name] = argument
            else:
                by_place[list(arguments).index(name)] = argument
        if isinstance(model, nn.Module):
            leave_earlier_run(model)
        self._weight_flips = WeightFlips()
        # An engine is built for the scheme of the layers: with one, `_build_engine` quantizes the policy in here.
        load = for_policy_alone(args, self._loader(args), replaced["model"], arguments.get("teacher_model"))
        with construction(type(self), partial(self._build_engine, args), load, with_low_bits):
            super().__init__(*by_place, **named)
        self._first_data = self.train_dataset

        if args.has_engine:
            engine = getattr(self, "vllm_generation", None)
            if not isinstance(engine, LowBitVLLMGeneration):
                raise RuntimeError(
                    f"{of_trl} must sample by TRL's VLLMGeneration, which the low-bit engine replaces, got "
                    f"{type(engine).__name__}. Set use_vllm=False."
                )
        else:
            check_end_tokens(self)
            say_inherited(self)
            # With an engine `_build_engine` has done it.
            prepare_policy(self.model, args, self._plan)
            # TRL's DPO and KTO made this digest before the layers were quantized. Where they have no reference model,
            # a later `evaluate` takes the policy.
            digest = getattr(self, "_precompute_model_hash", None)
            if digest is not None and self.ref_model is None and not args.frozen:
                self._precompute_model_hash = with_low_bits(digest, self.model)

        if args.quantized:
            warn_of_rounded_weights(self.model, args.learning_rate)
        reference = getattr(self, "ref_model", None)
        is_whole = not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if isinstance(model, nn.Module) and reference is not None and is_whole and arguments.get("ref_model") is None:
            warn_of_another_reference(self._unwrapped, self.accelerator.unwrap_model(reference))
        if hasattr(self, "reward_func_names"):
            # TRL would log the rewards of one name as one, the mean of both.
            self.reward_func_names = distinct_names(self.reward_func_names)

        if self.low_bit_store is not None:
            # Before the callbacks of the user, which may run the model after an optimizer step.
            acts_within_step = partial(callback_of_user, self, "on_substep_end")
            add_first_callback(self, TellStore(self.low_bit_store, acts_within_step))
            self.add_callback(CheckLayers(self._check_layers_ran, lambda: forget_training(self._unwrapped)))
        self._guard = ForwardGuard(self.low_bit_store)
        self._guard.watch(base_model(self._unwrapped))
        # Last, so that what other callbacks do at the end of a step counts in its time.
        engine = self.vllm_generation if args.has_engine else None
        self.add_callback(StepClock(engine, self._log_value, self._flips))

    # Low-bit weights -------------------------------------------------------------------------------------------------

    @property
    def low_bit_store(self) -> LowBitStore | None:
        """The owner of the policy's low-bit weights; `None` with quantization off."""
        return find_store(self._unwrapped)

    def _loader(self, args: Any) -> Any:
        """Loads the policy; `None` for TRL's own loader, of a trainer that loads in a way of its own."""
        if self._source is None and not args.frozen:
            return partial(self._load_whole, args) if loads_by_name(type(self)) else None

        # A frozen base is quantized while it loads, so that its high-precision weights are never in memory together.
        freeze = self._plan if args.frozen else None
        return partial(load_stored, freeze=freeze, gemm=gemm_choice(args.learner_kernel, args.quant_keep_matrices))

    def _load_whole(self, args: Any, name: str, *architecture: Any, **loading: Any) -> nn.Module:
        """As [`load_whole`]; the policy, which is the first, becomes a part of what identifies the run."""
        model = load_whole(args, name, *architecture, **loading)
        # A model that a script gave has its entry.
        if CONFIG not in self._identity:
            self._identity |= facts_of_loaded(model, self._identity)
        return model

    def _flips(self) -> dict[str, float]:
        if self.low_bit_store is None:
            return {}
        return self._weight_flips.update(self.low_bit_store.kept())

    def _check_layers_ran(self) -> None:
        """After the first step: every low-bit layer of every process must have trained."""
        bypassed = [] if self.low_bit_store is None else self.low_bit_store.bypassed_layers()
        number = torch.tensor([len(bypassed)], device=self.accelerator.device)
        numbers = self.accelerator.gather(number)
        if numbers.any():  # on any process, so that all of them stop
            first = bypassed[0] if bypassed else "on another process"
            raise RuntimeError(
                f"{int(numbers.max())} quantized layers did not run in the first step (first: {first}): "
                "another library replaced their forward, or the batch does not reach them. Add them to `quant_ignore` "
                "if that is intended."
            )

    def _prepare_inputs(self, *args: Any) -> Any:
        """TRL's method, in which trainers sample, score samples and check a sync: no training of a layer."""
        before = self._rollout_buffer.micro_batches
        # `CheckLayers` asks whether a layer trained. Forwards in here run even if the loss bypasses the layer.
        with outside_training(self._unwrapped), self._guard.trusting(self._trust_of_sampling()):
            inputs = super()._prepare_inputs(*args)

        if self.args.save_strategy != "no":
            self._rollout_buffer.check()

        # An evaluation samples for each batch, and keeps none.
        is_sampled_to_evaluate = self._rollout_buffer.exists and self._mode == "eval"
        if is_sampled_to_evaluate or self._rollout_buffer.micro_batches is not before:
            self._user_may_have_written()
        return inputs

    def _user_may_have_written(self) -> None:
        """
        Make low-bit weights again in a user's class, which may sample with other weights and put its own back.

        Exploration by noise on them does. Through `param.data` that leaves no trace. Other classes need not quantize
        again.
        """
        if self._is_of_user and self.low_bit_store is not None:
            self.low_bit_store.weights_changed()

    def _calculate_rewards(self, *args: Any, **named: Any) -> Tensor:
        """
        TRL's method of trainers with rewards; an error in one process stops all of them, and so does a rollout batch
        without rewards.
        """
        calculate = partial(self._calculate_outside, super()._calculate_rewards, *args, **named)
        home = home_of_rewards(type(self))
        # A trainer with a method of its own has its own way to end.
        if home is None:
            with self._mode_kept():
                return calculate()

        with self._mode_kept(), ungathered_rewards(home):
            rewards = guards.rewards_of_all(calculate, self.reward_func_names, self.accelerator)

        if self._mode == "train":
            self._scored_batches.check(rewards, self.reward_func_names, is_resumed=self.state.global_step > 0)
        return rewards

    def _calculate_outside(self, calculate: Callable[..., Tensor], *args: Any, **named: Any) -> Tensor:
        """Rewards. A reward function may run the model with other weights."""
        with self._guard.trusting(Trust.LOOKED_AT):
            return calculate(*args, **named)

    # Engine ----------------------------------------------------------------------------------------------------------

    def _build_engine(self, args: Any, model: nn.Module, **engine_args: Any) -> LowBitVLLMGeneration:
        """Takes the place of TRL's `VLLMGeneration(model, ...)` in its constructor."""
        prepare_policy(model, args, self._plan)
        return build_engine(self, args, model, **engine_args)

    def _tool_call_loop(self, *args: Any) -> tuple:
        """
        TRL's method of trainers with tools. Its number of generations differs between processes, so the engine must
        not wait for the others.
        """
        with self._generating_alone(), self._mode_kept():
            return super()._tool_call_loop(*args)

    @contextmanager
    def _mode_kept(self) -> Iterator[None]:
        """
        Let the model train after the block if it did before, and otherwise evaluate.

        A user's code may ask the policy, as a reward by a judge does, and leave it in evaluation. TRL goes by the
        model's mode: it would weigh the next micro-batch as a whole update, and log it as an evaluation.
        """
        was_training = self.model.training
        try:
            yield
        finally:
            if self.model.training != was_training:
                self.model.train(was_training)

    def _generating_alone(self) -> AbstractContextManager[Any]:
        """
        The context in which this process asks its engine more or less often than others do. An engine that processes
        share still waits for all of them.
        """
        if not self.args.has_engine or shares_engine(self.args):
            return nullcontext()
        return patch.object(self.vllm_generation, "alone", True)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """
        The Trainer's method, with the weights as they are: an EMA callback may swap weights for an evaluation and
        restore them.
        """
        with self._weights_as_they_are():
            return super().evaluate(*args, **kwargs)

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:
        """
        The Trainer's method, with the weights as they are, as in [`evaluate`]. The result has TRL's metrics, rewards
        among them, which would else be averaged into those of the next evaluation.
        """
        with self._weights_as_they_are():
            output = super().predict(test_dataset, ignore_keys, metric_key_prefix)

        metrics = getattr(self, "_metrics", None)
        if metrics is not None:
            merge_micro_batches(metrics["eval"])
            for name, values in metrics["eval"].items():
                # As TRL logs them: a reward may be NaN for a batch in which it does not apply.
                valid = [value for value in values if not math.isnan(value)]
                output.metrics[f"{metric_key_prefix}_{name}"] = sum(valid) / len(valid) if valid else None
            metrics["eval"].clear()
        return output

    @contextmanager
    def _weights_as_they_are(self) -> Iterator[None]:
        """Make low-bit weights anew at the start of the block, and again after it."""
        self._check_sharded()
        # Twice: the engine must not answer with weights of before, nor afterwards with those of the evaluation.
        self._weights_may_differ()
        try:
            yield
        finally:
            self._weights_may_differ()

    def _weights_may_differ(self) -> None:
        """Make low-bit weights again, and let TRL sync the engine before it samples, also within an optimizer step."""
        reshard(self._unwrapped)
        if self.low_bit_store is not None:
            self.low_bit_store.forget()
        self._rollout_buffer.force_sync()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float | None:
        """The Trainer's method, called before each update; a norm that is NaN or infinite stops the run."""
        grad_norm = super()._get_grad_norm(model, grad_norm)
        guards.check_gradient(grad_norm)
        return grad_norm

    # Small helpers ---------------------------------------------------------------------------------------------------

    @property
    def _unwrapped(self) -> Any:
        """The model without the wrappers of accelerate and torch.compile."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _gather_params(self, parameters: Any) -> AbstractContextManager[Any]:
        """A context in which parameters are whole under ZeRO-3."""
        return DistributedBackend(self.accelerator).gather_params(parameters)

    def _log_value(self, name: str, value: float) -> None:
        """Log a value with TRL's metrics of the current step."""
        self._log_in(self._mode, name, value)

    def _log_with_training(self, name: str, value: float) -> None:
        """Log a value with the next training step, also if a script asked for the sync before or between steps."""
        self._log_in("train", name, value)

    def _log_in(self, mode: str, name: str, value: float) -> None:
        """Log a value with TRL's metrics, if the trainer has them: those of CPO and online DPO (TRL 1.16) do not."""
        metrics = getattr(self, "_metrics", None)
        if metrics is not None:
            metrics[mode][name].append(value)
