"""Distillation into low bits: TRL's `DistillationTrainer` with a low-bit student."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from trl import DistillationTrainer
from trl.data_utils import is_conversational

from .configs import LowBitDistillationConfig
from .low_bit import LowBitMixin
from .teacher import BaseOfAdapter, loading_of_own_start, name_of_teacher, teacher_of_own_start, warn_of_masters


if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig, PeftModel
    from transformers import (
        BitsAndBytesConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
        TrainerCallback,
    )


logger = get_logger(__name__)


class LowBitDistillationTrainer(LowBitMixin, DistillationTrainer):
    """
    Distillation of a teacher in high precision into a student that runs on low-bit weights.

    The loss is TRL's divergence between the two, token by token (`beta`). The student samples with a low-bit engine
    (`use_vllm`) or with transformers, or learns on given answers (`distill_on="answers"`). With `quant_scheme="none"`
    it is TRL's trainer, bit for bit.

    Args:
        model: The student: a Hub id or folder, a model, or a `PeftModel`.
        teacher_model: The teacher, or its name; by default `args.teacher_model_name_or_path`, and without that the
            run's own start in high precision.
        args: A [`LowBitDistillationConfig`].
        train_dataset: With a column `prompt`, and for `distill_on="answers"` a column `completion`, text or messages.
        eval_dataset: The same for evaluations.
        processing_class: The tokenizer or processor, by default that of the model.
        callbacks: Callbacks of the Trainer.
        optimizers: An optimizer and a schedule in place of those in `args`.
        quantization_config: Of bitsandbytes. Only with `quant_scheme="none"`: it leaves no master weights.
        peft_config: Trains a LoRA adapter, merged before each quantization or beside a frozen base (`lora_base`).
        tools: Functions that the model may call while it answers.

    Raises:
        TypeError: if `args` is no [`LowBitDistillationConfig`].
        ValueError: if student, teacher, settings and data do not go together; raised before any weights load.
    """

    args: LowBitDistillationConfig

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        teacher_model: str | PreTrainedModel | None = None,
        args: LowBitDistillationConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable[..., Any]] | None = None,
    ) -> None:
        if not isinstance(args, LowBitDistillationConfig):
            raise TypeError(
                f"LowBitDistillationTrainer needs a LowBitDistillationConfig, got {type(args).__name__}. It takes the "
                "fields of DistillationConfig."
            )
        if tools and args.distill_on == "answers":
            raise ValueError("tools need distill_on='rollouts': given answers call nothing.")

        # The fields that are set below are of this run: a script may make another trainer from its config.
        args = copy.copy(args)
        teacher_model = teacher_model or args.teacher_model_name_or_path
        learns_from_itself = teacher_model is None
        if learns_from_itself:
            teacher_model = teacher_of_own_start(model, args, peft_config)
            if isinstance(model, str):
                args.teacher_model_init_kwargs = loading_of_own_start(args)
        # No name and no second model: the base weights below the student's adapter teach.
        shares_base = teacher_model is None

        # For cards, and for a resumed run, which must have the same teacher.
        self.learns_from_itself = learns_from_itself
        if not learns_from_itself:
            args.teacher_model_name_or_path = name_of_teacher(teacher_model)
            warn_of_masters(args.teacher_model_name_or_path, args.teacher_model_init_kwargs)
        # Answers of the rows that are being prepared, for `distill_on="answers"`.
        self._answers: list[Any] = []

        super().__init__(
            model=model,
            teacher_model=teacher_model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
        )
        # TRL takes `None` for a teacher that a subclass brings, and the student has its adapter only now.
        if shares_base:
            self.teacher_model = BaseOfAdapter(self.model)

    def _compute_loss(self, *args: Any) -> tuple:
        """
        TRL's method in the precision of the run.

        TRL (1.16) calls the two models past the forward in which accelerate has put autocast, so that `bf16` would
        count for the engine alone, and float32 master weights would mean a student in float32.
        """
        if not self.args.quantized:
            return super()._compute_loss(*args)
        # Around both models: the teacher, too, is called past its forward.
        with self.accelerator.autocast():
            return super()._compute_loss(*args)

    # Answers ---------------------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        """TRL's method, which lists what `remove_unused_columns` keeps. Answers that are there already stay, too."""
        super()._set_signature_columns_if_needed()
        if self.args.distill_on == "answers" and "completion" not in self._signature_columns:
            self._signature_columns.append("completion")

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's method, which samples completions and pads them; here also for answers that are there already."""
        if self.args.distill_on == "answers":
            # Before TRL's method, which asks `_generate_single_turn` for tokens: that no longer sees the rows.
            self._answers = [self._answer_tokens(row["prompt"], row["completion"]) for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """The tokens of the completions: those that TRL samples, or those of the given answers."""
        if self.args.distill_on == "answers":
            return self._answers
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _answer_tokens(self, prompt: Any, completion: Any) -> list[int]:
        """The tokens of an answer after its prompt, to its end token and at most `max_completion_length` of them."""
        if is_conversational({"prompt": prompt}):
            tokens = self._answer_tokens_of_chat(prompt, completion)
        else:
            tokens = self._tokenizer(completion, add_special_tokens=False)["input_ids"]
            # As a base model ends a text. A chat template writes its own end token.
            tokens = [*tokens, self._tokenizer.eos_token_id]

        # A template may write a line break after the end token, which no model would sample.
        ends = [place for place, token in enumerate(tokens) if token in self.eos_token_ids]
        # A text may have written its own end token, and a line break.
        more = tokens[ends[0] : ends[-1]] if ends else []
        if self._tokenizer.decode(more, skip_special_tokens=True).strip():
            logger.warning_once(
                "Answers of several turns are learned up to their first end token: what the model is asked next comes "
                "after it. Make a row of each turn, with those before it in its prompt."
            )
        if ends:
            tokens = tokens[: ends[0] + 1]
        if self.max_completion_length is not None and len(tokens) > self.max_completion_length:
            logger.warning_once(
                f"Answers of more than max_completion_length={self.max_completion_length} tokens are cut there, as "
                "sampled ones would be: their ends are not learned. Raise it to learn them whole."
            )
        # As long as sampled completions may be, for which the memory was planned.
        return tokens[: self.max_completion_length]

    def _answer_tokens_of_chat(self, prompt: list[dict[str, Any]], completion: Any) -> list[int]:
        """
        What the chat template writes for an answer after its prompt. `ValueError` if it changes the prompt for it.
        """
        messages = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        (of_prompt,), _, _ = self._tokenize_prompts([prompt])
        of_both = self._tokenizer.apply_chat_template(
            [*prompt, *messages],
            chat_template=self.chat_template,
            tokenize=True,
            return_dict=True,
            **self.chat_template_kwargs,
        )["input_ids"]

        # For instance a template that opens the thoughts of an answer in the prompt, and leaves them out of a given
        # answer.
        if of_both[: len(of_prompt)] != of_prompt or len(of_both) == len(of_prompt):
            raise ValueError(
                "The chat template renders a prompt differently when an answer follows, so the tokens of the answer "
                f"cannot be told: {messages!r:.200}. Give prompts and completions as text (conversational: false)."
            )
        return of_both[len(of_prompt) :]
