"""Which checkpoint a run resumes from, and whether every process can save in its folder."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor

from ..export.files import tensor_names
from ..quant.model import quantized_modules
from ..quant.names import base_model
from ..quant.scheme import describe_scheme
from .folder import INCOMING, MANIFEST, damage, finished, read_manifest, steps
from .lock import holding


if TYPE_CHECKING:
    from trl import GRPOTrainer

    from ..config import QaRLConfig

# transformers.trainer calls it TRAINER_STATE_NAME; to import that loads datasets and pandas, a fifth of a dry run.
STATE = "trainer_state.json"
# Seconds in which a file must be seen by the other machines.
PATIENCE = 15.0

logger = get_logger(__name__)


def resume_path(wish: str | bool | None, args: QaRLConfig, identity: Mapping[str, Any] | None = None) -> str | None:
    """
    The checkpoint to resume from, checked; decided by the first process for all.

    Args:
        wish (`str`, `bool` or `None`): `True` or `"true"`: the newest complete one of `args.output_dir`; `"auto"`: the same, and
            if there is no checkpoint `None`, a start from the beginning; a path; `None` or `False`: none.
        identity: Of the run, as of [`identity_of`], where it is known. The checkpoint must be of the same.

    Raises:
        ValueError, OSError: when there is none, when it is damaged or cannot be read, when it is of another model, scheme or
            tokenizer, or when it cannot be resumed; as `check_shared`.
    """

    def choose() -> str | None:
        found = _find(str(wish or "false"), Path(args.output_dir))
        if found:
            _check_resumable(Path(found), args, identity or {})
        return found

    check_shared(args)
    return on_first(args, choose)


def on_first(args: QaRLConfig, decide: Callable[[], Any]) -> Any:
    """What `decide` returns in the first process, on all of them; also its `ValueError` or `OSError`."""
    result, error = None, None
    if args.process_index == 0:
        try:
            result = decide()
        except (ValueError, OSError) as refusal:
            error = refusal
    if args.world_size > 1:
        result, error = broadcast_object_list([result, error])
    if error:
        raise error
    return result


def check_shared(args: QaRLConfig) -> None:
    """
    Of several processes that save checkpoints, each must see what the first writes to `args.output_dir`. Collective.

    Each writes its part of a checkpoint to its own `output_dir`, and the first tells all where to resume. With `save_only_model`
    nothing can be resumed, and `save_on_each_node` is for folders that are not shared. `ValueError`, in every process, when one
    does not see it within `PATIENCE`.
    """
    if args.world_size == 1 or args.save_strategy == "no" or args.save_only_model or args.save_on_each_node:
        return
    folder = Path(args.output_dir)

    def leave() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"_shared_{uuid4().hex}"
        file.touch()
        return file.name

    probe = folder / on_first(args, leave)
    end = time.monotonic() + PATIENCE  # network file systems remember for a while that a file is not there
    while not (seen := os.path.exists(probe)) and time.monotonic() < end:
        time.sleep(0.2)
    blind = [rank for rank, sees in enumerate(gather_object([seen])) if not sees]
    if args.process_index == 0:
        probe.unlink(missing_ok=True)
    if blind:
        raise ValueError(
            f"output_dir={args.output_dir!r} must be on a file system that all processes share: {len(blind)} of {args.world_size} "
            f"(first: {blind[0]}) do not see a file that the first wrote there. Share it, or set save_strategy: 'no'."
        )


def _find(wish: str, output_dir: Path) -> str | None:
    if wish.lower() == "false":
        return None
    if wish.lower() not in ("true", "auto"):
        return _given(Path(wish))
    _put_back(output_dir)
    bad = {folder: why for folder in steps(output_dir) if (why := damage(folder))}
    for folder, why in bad.items():
        logger.warning("%s is not resumed from and left alone: %s.", folder, why)
    if done := finished(output_dir):
        return str(done[-1])
    if bad:
        # To start over by oneself would in the end write over what may still be saved by hand.
        raise ValueError(
            f"resume_from_checkpoint={wish} found only damaged checkpoints in {output_dir}: "
            f"{'; '.join(f'{folder.name} ({why})' for folder, why in sorted(bad.items()))}. "
            "To start over, move them away or choose another output_dir."
        )
    if wish.lower() == "true":
        raise ValueError(
            f"resume_from_checkpoint={wish} found no checkpoint in {output_dir}. Give its path, or 'auto' to start "
            "from the beginning when there is none."
        )
    return None


def _put_back(output_dir: Path) -> None:
    """A whole checkpoint that a kill left between the two renames of `commit`, unless a run is writing there."""
    for folder in output_dir.glob(f"{INCOMING}/checkpoint-*"):
        with suppress(ValueError), holding(output_dir):
            if not (output_dir / folder.name).exists() and damage(folder) is None:
                folder.rename(output_dir / folder.name)


def _given(folder: Path) -> str:
    if not (folder / STATE).is_file():
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} is no training checkpoint. Give 'true', 'auto' or the path of a "
            "checkpoint-N."
        )
    if not (folder / MANIFEST).exists():
        tensor_names(folder)  # refuses weights that are cut off
        logger.warning("%s has no %s: that it is complete cannot be checked.", folder, MANIFEST)
    elif why := damage(folder):
        raise ValueError(f"{folder} is damaged: {why}. Resume from another one.")
    return str(folder)


def _check_resumable(folder: Path, args: QaRLConfig, identity: Mapping[str, Any]) -> None:
    if args.sync_ref_model:
        raise ValueError("sync_ref_model=True cannot be resumed: its reference is in no checkpoint. Set it to False.")
    if not (folder / "scheduler.pt").exists() and args.deepspeed_plugin is None:
        raise ValueError(
            f"{folder} holds weights without the optimizer (save_only_model). Give it as the model, and do not resume."
        )
    stored = read_manifest(folder) if (folder / MANIFEST).exists() else {}
    for name, value in identity.items():
        if name != "model" and name in stored and stored[name] != value:
            raise ValueError(
                f"{folder} is a checkpoint of another run: {name} was {stored[name]!r} with the model {stored.get('model')!r}, and is "
                f"{value!r} with {identity.get('model')!r}. Start with what it was made from, or use another output_dir."
            )
    processes = stored.get("processes", args.world_size)
    if processes != args.world_size:
        logger.warning(
            "%s was written by %d processes, and this run has %d: order of the data and random numbers will differ.",
            folder,
            processes,
            args.world_size,
        )


def identity_of(trainer: GRPOTrainer) -> dict[str, Any]:
    """
    What a run is of, as a manifest holds it: to be asked before the first step, on the first process.

    `model` is its name, and `weights` a digest of the names, shapes and first values of all weights it starts from (a folder may
    move, and another model may have its name and shapes). Of an adapter the base counts; under ZeRO-3, whose processes hold parts, names
    and shapes. The rest is what gives a rollout or an update another meaning.
    """
    args, model, tokenizer = trainer.args, base_model(trainer._unwrapped), trainer._tokenizer
    weights = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            # Of a sharded parameter the first process has the first rows.
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            first = local.detach().flatten()[:64].float().cpu()
            weights.update(f"{name} {shape}".encode() + first.numpy().tobytes())
    schemes = Counter(describe_scheme(layer.scheme) for _, layer in quantized_modules(model))
    read = [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map, tokenizer.chat_template]
    return {
        "model": model.config._name_or_path,
        "weights": weights.hexdigest()[:16],
        "tokenizer": hashlib.sha256(json.dumps(read, default=str).encode()).hexdigest()[:16],
        "scheme": ", ".join(f"{number} layers with {scheme}" for scheme, number in schemes.items()) or "none",
        "quantize_learner": args.quantized and args.quantize_learner,
        "loss_type": args.loss_type,
        "optim_muon": args.optim_muon,
        "adapter": model is not trainer._unwrapped,
    }
