"""What can be known of a recipe before it runs: its settings, data and rewards, and the mismatch."""

from __future__ import annotations

import copy
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer
from trl import get_peft_config

from ...config import QaRLConfig
from ...quant.experts import num_experts
from ...rewards import load_rewards
from ...train import QaRLScriptArguments, load_datasets
from ...validate import check_arguments, check_data, check_run
from . import FAIL, OK, SKIPPED, Finding
from .mismatch import describe, measure
from .rewards import check_reward


REWARD_ROWS = 32


class Recipe:
    """A recipe as `qarl_trl.train.parse` read it."""

    def __init__(self, script_args: QaRLScriptArguments, args: QaRLConfig, model_args: Any) -> None:
        self.script_args, self.args, self.model_args = script_args, args, model_args
        self.dataset: Any = None

    @cached_property
    def folder(self) -> str | None:
        """Of the model, if it is on this machine, in the Hub's cache too. Nothing is downloaded."""
        name = self.model_args.model_name_or_path
        if Path(name).expanduser().is_dir():
            return str(Path(name).expanduser())
        try:
            return snapshot_download(name, local_files_only=True)
        except (OSError, ValueError):
            return None

    def data(self) -> list[Finding]:
        """Load the data set and ask each reward about its first rows."""
        self.dataset, _ = load_datasets(self.script_args, with_eval=self.args.eval_strategy != "no")
        rows = [self.dataset[i] for i in range(min(REWARD_ROWS, len(self.dataset)))]
        found = [Finding(OK, "dataset", f"{len(self.dataset)} rows; first answer {rows[0]['answer'][:60]!r}")]
        rewards = load_rewards(self.script_args.reward_funcs)
        return found + [check_reward(getattr(r, "__name__", str(r)), r, rows) for r in rewards]

    def settings(self) -> list[Finding]:
        """What the trainer would refuse on this machine, before it loads the model."""
        args = copy.copy(self.args)
        args.push_to_hub = False  # that check creates the repository
        found = []
        if not torch.cuda.is_available():
            text = "no CUDA device: a recipe for GPUs too is checked as a run on this CPU"
            found.append(Finding(SKIPPED, "device", text))
        given = {"peft_config": get_peft_config(self.model_args), "train_dataset": self.dataset}
        try:
            if self.folder is None:
                text = f"{self.model_args.model_name_or_path} is not on this machine: its layers were not looked at"
                found.append(Finding(SKIPPED, "model", text))
                check_arguments(self.model_args.model_name_or_path, args, given)
                check_data(given, args)
            else:
                check_run(self.folder, args, given)
        except (ValueError, TypeError, ImportError, OSError) as error:
            return [*found, Finding(FAIL, "settings", str(error))]
        engine = "vLLM" if args.use_vllm else "transformers (slow)"
        return [*found, Finding(OK, "settings", f"{args.quant_name}, {args.loss_type}, rollouts by {engine}")]

    def mismatch(self, number: int, tokens: int) -> list[Finding]:
        """Measure the mismatch, or say why not."""
        trust = {"trust_remote_code": self.args.trust_remote_code}
        config = self.folder and AutoConfig.from_pretrained(self.folder, **trust)
        reasons = {
            "no local model": config is None,
            "the model is quantized already": getattr(config, "quantization_config", None) is not None,
            "a mixture of experts": config is not None and num_experts(config) > 0,
            "use_vllm: false, so the learner samples itself": not self.args.use_vllm,
            "no prompts": number < 1 or not self.dataset,
        }
        if reason := next((reason for reason, applies in reasons.items() if applies), None):
            return [Finding(SKIPPED, "mismatch", f"{reason}: not measured")]
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        tokenizer = AutoTokenizer.from_pretrained(self.folder, **trust)
        chat = {"add_generation_prompt": True, "return_dict": False} | (self.args.chat_template_kwargs or {})
        ids = []
        for prompt in self.dataset.select(range(min(number, len(self.dataset))))["prompt"]:
            text = isinstance(prompt, str)
            ids.append(tokenizer(prompt)["input_ids"] if text else tokenizer.apply_chat_template(prompt, **chat))
        return describe(measure(self.folder, self.args, ids, tokens), self.args)
