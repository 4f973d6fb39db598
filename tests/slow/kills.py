"""Training that is killed and started again, and how it ends: for test_resume.py and benchmarks/faults.py."""

from __future__ import annotations

import contextlib
import hashlib
import math
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from hub_server import WRITER

from .isolated import ENVIRONMENT, PRELOADED
from .toys import make_trainer


# The phase to kill in, which of its beginnings in this process (from 1), and how many seconds after it.
Kill = tuple[str, int, float]

# What a kill may fall into. The longest delay after its begin, in seconds, reaches beyond its end.
PHASES = {
    "start": 3.0,
    "resume": 0.5,
    "sync": 0.3,
    "sample": 0.5,
    "train": 0.2,
    "save": 0.4,
    "rotate": 0.004,
    "end": 0.06,
}
# Phases of runs with a frozen base, and of runs that push to the Hub at their end.
PHASES_OF_SHARING = {"base": 0.15, "push": 0.02}
# Rollout batches of four updates, two of them an epoch; a checkpoint after each update.
SETTINGS = {
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 11,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 2,
    "optim_muon": True,
    "warmup_steps": 5,
}
WITHOUT_ENGINE = {"use_vllm": False, "max_completion_length": 8, "bf16": False}


def run(
    model: str,
    folder: Path,
    engine: bool,
    kill: Kill | None = None,
    by: int = signal.SIGKILL,
    server: int | None = None,
    hub: str | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """
    One start with `resume_from_checkpoint="auto"`, in a process of its own.

    Args:
        model: Folder of the model.
        folder: Output folder, where `log` gets what the run prints.
        engine: Whether vLLM's engine samples, or transformers.
        kill: When to kill the run; `None` lets it end by itself.
        by: The signal it gets. After another one than SIGKILL it may take a minute to leave.
        server: A process group that gets SIGKILL instead of the run, which must then end by itself.
        hub: Address of a Hub to push to at the end, see `hub_server`.
        changes: Of the settings.

    Returns:
        `killed`; `phase` and `step`, in which it was at last; `resumed`, the step it continued from; `code`; and, of a
        run that ended, `digests` of master weights, quantized values, optimizer and the saved model.

    Raises:
        AssertionError: if the run failed and was not killed.
    """
    process, receiver = _start(model, folder, engine, hub, changes)
    outcome: dict[str, Any] = {"killed": False, "resumed": None, "phase": None, "step": None, "digests": None}
    try:
        ended = _follow(receiver, kill, outcome)
        if ended:
            process.join()
    finally:
        outcome["killed"] = process.is_alive()
        if outcome["killed"]:
            _interrupt(process, by, server)
        _kill_group(process)

    outcome["code"] = process.exitcode
    # The run was faster than the kill.
    if process.exitcode == 0:
        outcome["killed"] = False

    if not outcome["killed"] and outcome["digests"] is None:
        log = folder / "log"
        raise AssertionError(f"the run failed: see {log}\n{log.read_text()[-3000:]}")
    return outcome


def random_kill(rng: random.Random, engine: bool) -> Kill:
    """A moment to kill at, see [`run`]."""
    phases = list(PHASES)
    if not engine:
        # Transformers samples from the learner's own weights, within `train`.
        phases.remove("sync")
        phases.remove("sample")
    phase = rng.choice(phases)

    # Beginnings that most runs get to: each start continues the run before it.
    if phase in ("start", "resume", "end"):
        number = 1
    elif phase in ("sync", "sample"):
        number = rng.randint(1, 2)
    else:
        number = rng.randint(1, 5)
    return phase, number, rng.uniform(0, PHASES[phase])


# In the parent -------------------------------------------------------------------------------------------------------


def _start(model: str, folder: Path, engine: bool, hub: str | None, changes: dict[str, Any]) -> tuple[Any, Any]:
    """The process of a run, and the pipe by which it says what it does."""
    # The fork server keeps the environment of its start.
    os.environ.update(ENVIRONMENT)
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, model, str(folder), engine, hub, changes, dict(os.environ))
    process = context.Process(target=_train, args=arguments)
    process.start()
    # As long as this end is open here, the end of the run would not end the pipe.
    sender.close()
    return process, receiver


def _follow(receiver: Any, kill: Kill | None, outcome: dict[str, Any]) -> bool:
    """Write what a run says into `outcome`, until it ends (`True`) or until the moment to kill it (`False`)."""
    beginnings = 0
    kill_at = math.inf

    while time.monotonic() < kill_at:
        patience = max(0.0, min(300.0, kill_at - time.monotonic()))
        if not receiver.poll(patience):
            continue
        try:
            what, value = receiver.recv()
        except EOFError:
            return True

        if what in ("resumed", "digests"):
            outcome[what] = value
            continue

        # Everything else is the begin of a phase, with its step.
        outcome["phase"] = what
        outcome["step"] = value
        if kill is None or what != kill[0]:
            continue

        beginnings += 1
        if beginnings == kill[1]:
            kill_at = time.monotonic() + kill[2]

    return False


def _interrupt(process: Any, by: int, server: int | None) -> None:
    """Kill the server of a run, or ask the run to leave, and wait for its end. SIGKILL needs no wait."""
    if server is not None:
        os.killpg(server, signal.SIGKILL)
        process.join(120)
    elif by != signal.SIGKILL:
        os.kill(process.pid, by)
        process.join(60)


def _kill_group(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


# In the child --------------------------------------------------------------------------------------------------------


def _train(
    sender: Any,
    model: str,
    folder: str,
    engine: bool,
    hub: str | None,
    changes: dict[str, Any],
    environment: dict[str, str],
) -> None:
    from qarl_trl.cpu_exact.arithmetic import choose_arithmetic
    from qarl_trl.export.files import READ_BY_ENGINE

    # A group of its own, so that a kill reaches also what the run starts.
    os.setpgrp()
    os.environ.update(environment)
    choose_arithmetic()
    _print_into(Path(folder))
    sender.send(("start", 0))

    arguments = SETTINGS | ({} if engine else WITHOUT_ENGINE) | changes
    if hub is not None:
        _use_hub(hub)
        arguments |= {"push_to_hub": True, "hub_model_id": "me/toy"}
    trainer = make_trainer(model, Path(folder), number=4, **arguments)
    _announce_phases(trainer, engine, sender)
    _announce_resume(trainer, sender)
    trainer.train(resume_from_checkpoint="auto")

    sender.send(("end", trainer.state.global_step))
    if hub is None:
        trainer.save_model()
    else:
        trainer.push_to_hub()

    # What a user would serve: the folder also has checkpoints and the log.
    files = {}
    for pattern in READ_BY_ENGINE:
        for path in Path(folder).glob(pattern):
            files[f"saved {path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    sender.send(("digests", digests(trainer) | files))


def _use_hub(url: str) -> None:
    """Let the real client talk to a Hub of the tests: it has read its environment already, in the fork server."""
    from huggingface_hub import constants

    constants.ENDPOINT = url
    constants.HF_HUB_OFFLINE = False
    os.environ["HF_TOKEN"] = WRITER


def _print_into(folder: Path) -> None:
    """Send standard output and error of this process into a log, also what C++ prints."""
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _announce_phases(trainer: Any, engine: bool, sender: Any) -> None:
    from qarl_trl.checkpoints import saving
    from qarl_trl.export import push

    # By the module that calls it: it imported the function by name.
    _announce(trainer, saving, "rotate", "rotate", sender)
    _announce(trainer, trainer, "_load_from_checkpoint", "resume", sender)
    _announce(trainer, trainer, "training_step", "train", sender)
    _announce(trainer, trainer, "_save_checkpoint", "save", sender)
    _announce(trainer, trainer, "_save_quantized_base", "base", sender)
    _announce(trainer, push.HfApi, "create_commit", "push", sender)
    if engine:
        _announce(trainer, trainer.vllm_generation, "sync_weights", "sync", sender)
        _announce(trainer, trainer.vllm_generation, "generate", "sample", sender)


def _announce(trainer: Any, owner: Any, name: str, phase: str, sender: Any) -> None:
    """Let a function of `owner` send the phase that begins with each of its calls."""
    original = getattr(owner, name)

    def announced(*args: Any, **kwargs: Any) -> Any:
        sender.send((phase, trainer.state.global_step))
        return original(*args, **kwargs)

    setattr(owner, name, announced)


def _announce_resume(trainer: Any, sender: Any) -> None:
    """Send the step that a run continues from. The state of the random numbers is the last that the Trainer loads."""
    load_rng_state = trainer._load_rng_state

    def announced(checkpoint: str) -> None:
        load_rng_state(checkpoint)
        sender.send(("resumed", trainer.state.global_step))

    trainer._load_rng_state = announced


def digests(trainer: Any) -> dict[str, str]:
    """SHA-256 of every master weight, every state of the optimizer and every tensor that would be synced."""
    import torch

    from qarl_trl.quant import iter_low_bit_weights

    tensors = {}
    for name, parameter in trainer.model.named_parameters():
        tensors[f"master {name}"] = parameter.detach()
    for name, tensor in iter_low_bit_weights(trainer.model):
        tensors[f"code {name}"] = tensor
    for index, state in trainer.optimizer.state_dict()["state"].items():
        for key, value in state.items():
            tensors[f"state {index} {key}"] = torch.as_tensor(value)

    return dict(zip(tensors, map(_digest, tensors.values()), strict=True))


def _digest(tensor: Any) -> str:
    import torch

    # As bytes, because numpy has no bfloat16.
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest()
