"""The sections that need a recipe: its settings, memory and disk, data and rewards, and the budget of the mismatch."""

from __future__ import annotations

import copy
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from ..._compat import is_zero3, num_shards
from ...config import QaRLConfig
from ...quant.experts import num_experts
from ...rewards import load_rewards
from ...train import QaRLScriptArguments, load_datasets
from ...validate import available_memory, check_arguments, check_data, check_run
from ..plan.model import longest_row, run_of
from ..plan.rank import checkpoint_bytes
from .budget import describe, measure
from .findings import FAIL, OK, PLAIN, SKIPPED, WARN, Finding
from .machine import GIB, disk
from .memory import largest_moment
from .rewards import check_reward


class Run:
    """A run as `qarl_trl.train.parse` read it."""

    def __init__(self, script_args: QaRLScriptArguments, args: QaRLConfig, model_args: Any) -> None:
        from trl import get_peft_config

        self.script_args, self.args, self.model_args = script_args, args, model_args
        self.peft_config = get_peft_config(model_args)
        self.rows: list[dict[str, Any]] = []

    @cached_property
    def folder(self) -> Path | None:
        """Of the model, if it is on this machine, in the Hub's cache too. Nothing is downloaded."""
        name = self.model_args.model_name_or_path
        if Path(name).expanduser().is_dir():
            return Path(name).expanduser()
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except (OSError, ValueError):
            return None

    @cached_property
    def config(self) -> PretrainedConfig | None:
        """Of the model, if it is on this machine."""
        if self.folder is None:
            return None
        return AutoConfig.from_pretrained(self.folder, trust_remote_code=self.args.trust_remote_code)

    def settings(self) -> list[Finding]:
        """What the trainer would refuse on this machine."""
        args, found = self.args, []
        if not torch.cuda.is_available():
            text = "no CUDA device: checked as a run on this CPU, also a recipe for GPUs"
            found.append(Finding(SKIPPED, "device", text))
        name = str(self.folder or self.model_args.model_name_or_path)
        if self.folder is None:
            found.append(Finding(SKIPPED, "model", f"{name} is not on this machine: its layers were not looked at"))
        try:
            if self.folder is None:
                check_arguments(name, args, {"peft_config": self.peft_config})
            else:
                quiet = copy.copy(args)
                quiet.push_to_hub = False  # that check creates the repository
                check_run(name, quiet, {"peft_config": self.peft_config})
        except (ValueError, TypeError, ImportError) as error:
            return [*found, Finding(FAIL, "settings", str(error))]
        engine = "vLLM" if args.use_vllm else "transformers (slow)"
        return [*found, Finding(OK, "settings", f"{args.quant_name}, {args.loss_type}, rollouts by {engine}")]

    def memory(self, gpus: int | None, sharding: str | None) -> list[Finding]:
        """Needed against there on each of `gpus` (by default as launched), and the disk."""
        if self.config is None:
            return [Finding(SKIPPED, "memory", "the model is not on this machine: not estimated")]
        if getattr(self.config, "quantization_config", None) is not None:
            return [Finding(SKIPPED, "memory", "the model is quantized: not estimated")]
        args = self.args
        on_gpu = args.device.type == "cuda"
        of_machine = available_memory(), psutil.virtual_memory().total
        free, total = torch.cuda.mem_get_info(args.device) if on_gpu else of_machine
        sharded = sharding != "ddp" and gpus > 1 if gpus else num_shards(args) > 1
        ranks = gpus or (num_shards(args) if sharded else args.world_size)
        size = {"ranks": ranks, "sharded": sharded, "memory": total, "tokens": longest_row(args)}
        size["zero3"] = not gpus and is_zero3(args)
        try:
            run = run_of(args, self.model_args, self.config, **size)
        except AttributeError as error:  # not of the Llama family
            return [Finding(SKIPPED, "memory", f"sizes of its layers are not known: not estimated ({error})")]
        except ValueError as error:
            return [Finding(FAIL, "memory", str(error))]
        moment, parts = largest_moment(run, on_gpu)
        found = [Finding(PLAIN, name, f"{value / GIB:9.3f} GiB") for name, value in parts.items()]
        needed, together = sum(parts.values()), "" if on_gpu or ranks == 1 else f", {ranks} processes"
        needed *= ranks if together else 1  # which share the memory of a CPU
        status = FAIL if needed > free else WARN if needed > 0.9 * free else OK
        text = f"{needed / GIB:9.3f} GiB of {free / GIB:.2f} GiB free ({moment}{together})"
        if status == FAIL and on_gpu:
            text += "; more GPUs: --gpus N; `qarl-trl plan` says what helps"
        return [*found, Finding(status, "sum", text), disk(args.output_dir, checkpoint_bytes(run))]

    def data(self, number: int) -> list[Finding]:
        """Load the data set and ask each reward about its first rows."""
        try:
            dataset, _ = load_datasets(self.script_args, with_eval=self.args.eval_strategy != "no")
        except (ValueError, OSError) as error:
            return [Finding(FAIL, "dataset", str(error)), Finding(SKIPPED, "rewards", "not checked: no data")]
        self.rows = [dataset[i] for i in range(min(number, len(dataset)))]
        found = [Finding(OK, "dataset", f"{len(dataset)} rows; first answer {self.rows[0]['answer'][:60]!r}")]
        try:
            check_data({"train_dataset": dataset}, self.args)
        except ValueError as error:
            found.append(Finding(FAIL, "dataset", str(error)))
        rewards = load_rewards(self.script_args.reward_funcs)
        return found + [check_reward(getattr(r, "__name__", str(r)), r, self.rows) for r in rewards]

    def budget(self, number: int, tokens: int) -> list[Finding]:
        """Measure where the mismatch comes from, or say why not."""
        reason = self._why_no_budget(number)
        if reason is not None:
            return [Finding(SKIPPED, "budget", f"{reason}: not measured")]
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        prompts = self._prompt_ids(number)
        found = measure(str(self.folder), self.args, prompts, tokens)
        head = Finding(PLAIN, "measured on", f"{len(prompts)} prompts, {found.tokens} sampled tokens")
        return [head, *describe(found, self.args)]

    def _why_no_budget(self, number: int) -> str | None:
        missing = [] if self.config is None else getattr(self.config, "quantization_config", None)
        reasons = {
            "no local model": self.config is None,
            "the model is quantized already": bool(missing),
            "a mixture of experts": self.config is not None and num_experts(self.config) > 0,
            "use_vllm: false, so the learner samples itself": not self.args.use_vllm,
            "no prompts": number < 1 or not self.rows,
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def _prompt_ids(self, number: int) -> list[list[int]]:
        tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.args.trust_remote_code)
        prompts, more = [row["prompt"] for row in self.rows[:number]], self.args.chat_template_kwargs or {}
        if isinstance(prompts[0], str):
            return [tokenizer(text)["input_ids"] for text in prompts]
        texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False, **more) for p in prompts]
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
