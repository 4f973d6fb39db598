"""Training that is killed and started again, and how it ends: for tests/slow/test_resume.py and benchmarks/faults.py."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from .isolated import ENVIRONMENT, PRELOADED
from .toys import make_trainer


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
    kill: tuple[str, int, float] | None = None,
    by: int = signal.SIGKILL,
    server: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """
    One start with `resume_from_checkpoint="auto"`, in a process of its own.

    Args: model folder; output folder; with the engine or by transformers; `kill`: the phase, which of its beginnings in this
    process, and how many seconds after it the process gets the signal `by`, after which it may take a minute to leave, or with
    `server` that process group SIGKILL, after which the run must end by itself; `changes` of the settings.

    Returns: `killed`, the phase and step it was in, `resumed` (step), `code`, and, of a run that ended, `digests` of master weights,
    quantized values, optimizer and the saved model.
    """
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(sender, model, str(folder), engine, changes, dict(os.environ)))
    process.start()
    sender.close()
    found: dict[str, Any] = {"killed": False, "resumed": None, "phase": None, "step": None, "digests": None}
    seen, at = 0, None
    try:
        while at is None or time.monotonic() < at:
            if not receiver.poll(300 if at is None else max(0.0, at - time.monotonic())):
                continue
            try:
                what, value = receiver.recv()
            except EOFError:
                process.join()
                break
            if what in ("resumed", "digests"):
                found[what] = value
                continue
            found |= {"phase": what, "step": value}
            seen += kill is not None and what == kill[0]
            if kill is not None and what == kill[0] and seen == kill[1]:
                at = time.monotonic() + kill[2]
    finally:
        found["killed"] = process.is_alive()
        if found["killed"] and server is not None:
            os.killpg(server, signal.SIGKILL)
            process.join(120)
        elif found["killed"] and by != signal.SIGKILL:
            os.kill(process.pid, by)
            process.join(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    found["code"] = process.exitcode
    found["killed"] &= process.exitcode != 0  # otherwise it had ended by itself
    if not found["killed"] and found["digests"] is None:
        raise AssertionError(f"the run failed: see {folder / 'log'}\n{(folder / 'log').read_text()[-3000:]}")
    return found


def random_kill(rng: random.Random, engine: bool) -> tuple[str, int, float]:
    """A moment to kill at, see [`run`]."""
    phase = rng.choice([name for name in PHASES if engine or name not in ("sync", "sample")])
    number = 1 if phase in ("start", "resume", "end") else rng.randint(1, 2 if phase in ("sync", "sample") else 5)
    return phase, number, rng.uniform(0, PHASES[phase])


def _train(
    sender: Any, model: str, folder: str, engine: bool, changes: dict[str, Any], environment: dict[str, str]
) -> None:
    from qarl_trl.checkpoints import mixin
    from qarl_trl.cpu_exact.arithmetic import choose_arithmetic
    from qarl_trl.export.files import READ_BY_ENGINE

    os.setpgrp()
    os.environ.update(environment)
    choose_arithmetic()
    Path(folder).mkdir(parents=True, exist_ok=True)
    log = os.open(Path(folder) / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sender.send(("start", 0))
    trainer = make_trainer(model, Path(folder), number=4, **SETTINGS | ({} if engine else WITHOUT_ENGINE) | changes)
    owners = {"_load_from_checkpoint": "resume", "training_step": "train", "_save_checkpoint": "save"}
    seams = [(mixin, "rotate", "rotate"), *((trainer, name, phase) for name, phase in owners.items())]
    if engine:
        seams += [
            (trainer.vllm_generation, "sync_weights", "sync"),
            (trainer.vllm_generation, "generate", "sample"),
        ]
    for owner, name, phase in seams:
        _announce(trainer, owner, name, phase, sender)
    load = trainer._load_rng_state
    trainer._load_rng_state = lambda path: (load(path), sender.send(("resumed", trainer.state.global_step)))
    trainer.train(resume_from_checkpoint="auto")
    sender.send(("end", trainer.state.global_step))
    trainer.save_model()
    saved = {path for kind in READ_BY_ENGINE for path in Path(folder).glob(kind)}
    files = {f"saved {path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in saved}
    sender.send(("digests", digests(trainer) | files))


def _announce(trainer: Any, owner: Any, name: str, phase: str, sender: Any) -> None:
    original = getattr(owner, name)

    def announced(*args: Any, **kwargs: Any) -> Any:
        sender.send((phase, trainer.state.global_step))
        return original(*args, **kwargs)

    setattr(owner, name, announced)


def digests(trainer: Any) -> dict[str, str]:
    """SHA-256 of every master, every state of the optimizer and every tensor that would be synced."""
    import torch

    from qarl_trl.quant import iter_low_bit_weights

    tensors = {f"master {name}": p.detach() for name, p in trainer.model.named_parameters()}
    tensors |= {f"code {name}": t for name, t in iter_low_bit_weights(trainer.model)}
    for index, state in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"state {index} {key}": torch.as_tensor(value) for key, value in state.items()}
    return {
        n: hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest() for n, t in tensors.items()
    }
