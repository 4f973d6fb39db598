"""What can be known of a recipe before it runs: its settings, data and rewards, memory and disk, and the mismatch."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer
from trl import get_peft_config

from ..._compat import is_zero3, num_shards
from ...config import QaRLConfig
from ...quant.experts import num_experts
from ...rewards import load_rewards
from ...train import QaRLScriptArguments, load_datasets
from ...validate import available_memory, check_arguments, check_data, check_run
from ..plan import rank
from ..plan.model import UnknownSizes, plan_run
from .findings import FAIL, OK, SKIPPED, WARN, Finding
from .machine import GIB
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
            found.append(
                Finding(SKIPPED, "device", "no CUDA device: a recipe for GPUs too is checked as a run on this CPU")
            )
        if self.folder is None:
            text = "is not on this machine: its layers were not looked at"
            found.append(Finding(SKIPPED, "model", f"{self.model_args.model_name_or_path} {text}"))
        given = {"peft_config": get_peft_config(self.model_args), "train_dataset": self.dataset}
        try:
            if self.folder is None:
                check_arguments(self.model_args.model_name_or_path, args, given)
                check_data(given, args)
            else:
                check_run(self.folder, args, given)
        except (ValueError, TypeError, ImportError, MemoryError) as error:
            return [*found, Finding(FAIL, "settings", str(error))]
        if filters := [name for name in ("top_p", "top_k", "min_p") if getattr(args, name) not in (None, 0, 1)]:
            text = f"{', '.join(filters)}: the engine's log-probs are of the tokens kept, the learner's of all. Sample from all"
            found.append(Finding(WARN, "sampling", text))
        engine = "vLLM" if args.use_vllm else "transformers (slow)"
        return [*found, Finding(OK, "settings", f"{args.quant_name}, {args.loss_type}, rollouts by {engine}")]

    def memory(self, gpus: int | None, memory: float | None, sharding: str | None) -> list[Finding]:
        """The largest moment by `qarl-trl plan` against what is free on each GPU, or on this CPU; and the disk."""
        args = self.args
        if gpus is None:
            sharding = "zero3" if is_zero3(args) else "fsdp2" if num_shards(args) > 1 else "ddp"
        on_gpu = memory is not None or args.device.type == "cuda"
        if memory is not None:
            free = total = memory * GIB
        elif on_gpu:
            free, total = torch.cuda.mem_get_info(args.device)
        else:
            free, total = available_memory(), psutil.virtual_memory().total
        model_args = copy.copy(self.model_args)
        model_args.model_name_or_path = self.folder or model_args.model_name_or_path
        try:
            run = plan_run(args, model_args, gpus or args.world_size, total / GIB, sharding, on_gpu=on_gpu)
        except UnknownSizes as error:
            return [Finding(SKIPPED, "memory", f"not estimated: {error}")]
        if on_gpu:
            moment, needed = max(rank.peaks(run).items(), key=lambda peak: peak[1])
        else:
            moment, needed = f"backward, {run.ranks} process(es)", run.ranks * cpu_bytes(run)
        text = (
            f"{needed / GIB:.2f} of {free / GIB:.2f} GiB in the {moment}; `qarl-trl plan` says of what, and what helps"
        )
        status = FAIL if needed > free else WARN if needed > 0.9 * free else OK
        return [Finding(status, "memory", text), disk(args.output_dir, rank.checkpoint_bytes(run))]

    def mismatch(self, number: int, tokens: int) -> list[Finding]:
        """Measure where the mismatch comes from, or say why not."""
        config = self.folder and AutoConfig.from_pretrained(self.folder, trust_remote_code=self.args.trust_remote_code)
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
        rows = [self.dataset[i]["prompt"] for i in range(min(number, len(self.dataset)))]
        found = measure(self.folder, self.args, self._ids(rows), tokens)
        return describe(found, self.args)

    def _ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of texts or conversations, as a rollout begins with them."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.args.trust_remote_code)
        if isinstance(prompts[0], str):
            return [tokenizer(text)["input_ids"] for text in prompts]
        more = {"add_generation_prompt": True, "tokenize": False} | (self.args.chat_template_kwargs or {})
        texts = [tokenizer.apply_chat_template(prompt, **more) for prompt in prompts]
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def cpu_bytes(run: rank.Run) -> int:
    """Bytes of a process on a CPU: no driver's reserve, and an engine that does not sleep."""
    alone = rank.peaks(replace(run, utilization=0.0))["backward"] - rank.RESERVE
    # vllm-cpu takes its share of the whole machine, unless it is told the size of the cache.
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    engine = run.synced + int(float(space) * GIB) if space else rank.engine_budget(run)
    return alone + (engine if run.beside else 0)


def disk(folder: str, needed: float) -> Finding:
    """Free space where `folder` is or will be, against `needed` bytes of one training checkpoint."""
    path = Path(folder).expanduser().absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    text = f"{free / GIB:.1f} GiB free for {folder}; a training checkpoint takes about {needed / GIB:.1f} GiB"
    return Finding(FAIL if free < needed else WARN if free < 3 * needed else OK, "disk", text)
