"""Which checkpoint a run resumes from, and whether every process can save in its folder."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from ..export.files import tensor_names
from ..quant.names import base_model
from ..quant.scheme import describe_scheme
from .folder import INCOMING, MANIFEST, damage, finished, read_manifest, steps
from .lock import holding


if TYPE_CHECKING:
    from ..config import QaRLConfig

# transformers.trainer calls it TRAINER_STATE_NAME; to import that loads datasets and pandas, a fifth of a dry run.
STATE = "trainer_state.json"
# Seconds in which a file must be seen by the other machines.
PATIENCE = 15.0
# Of a config: what may differ between two copies of a model.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype")

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
        if name != "model" and None not in (value, stored.get(name)) and stored[name] != value:
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


def identity_of(
    model: str | nn.Module, args: QaRLConfig, plan: QuantizationConfig | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """
    What a run is of, as a manifest holds it, before anything loads; `None` for what cannot be known then.

    `weights` is a digest of some first values: a folder may move, and another model may have its name and shapes. Of a Hub id it is that
    and the revision. Of an adapter the base counts. The rest is what gives a rollout or an update another meaning. `given` are the
    trainer's arguments.
    """
    module = None if isinstance(model, str) else base_model(model)
    name = model if module is None else module.config._name_or_path
    where = {"trust_remote_code": args.trust_remote_code, "revision": None} | (args.model_init_kwargs or {})
    where = {key: where[key] for key in ("trust_remote_code", "revision")}
    config = None if module is not None else AutoConfig.from_pretrained(name, **where).to_dict()
    tokenizer = given.get("processing_class") or (AutoTokenizer.from_pretrained(name, **where) if name else None)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    read = tokenizer and [sorted(tokenizer.get_vocab().items()), tokenizer.eos_token, tokenizer.chat_template]
    if name and not Path(name).is_dir():
        weights = f"{name}@{where['revision'] or 'main'}"
    else:
        weights = _digest([(n, t.flatten()[:64].float().tolist()) for n, t in _first_tensors(name, module)])
    layers = plan and {describe_scheme(group): group.targets for group in plan.config_groups.values()}
    return {
        "model": name,
        "config": config and _digest({key: config[key] for key in config if key not in _NOT_THE_MODEL}),
        "weights": weights,
        "tokenizer": read and _digest(read),
        "scheme": f"{layers} without {plan.ignore}" if plan else "none",
        "quantize_learner": args.quantized and args.quantize_learner,
        "loss_type": args.loss_type,
        "optim_muon": args.optim_muon,
        "adapter": given.get("peft_config") is not None or module not in (None, model),
    }


def _first_tensors(folder: str, module: nn.Module | None) -> Iterator[tuple[str, Tensor]]:
    """Names and first rows of up to 256 tensors of each file in the folder, or of a model without one."""
    for path in sorted(Path(folder).glob("*.safetensors")) if folder else ():
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            for name in names[:: len(names) // 256 + 1]:
                rows = file.get_slice(name)
                yield name, rows[:1] if rows.get_shape() else file.get_tensor(name)
    for name, parameter in () if folder else module.named_parameters():
        if "lora_" not in name:
            yield name, parameter.detach()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]
