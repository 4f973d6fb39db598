"""Which checkpoint a run resumes from, decided before a model loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
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
            tokenizer, or when it cannot be resumed.
    """

    def choose() -> str | None:
        found = _find(str(wish or "false"), Path(args.output_dir))
        if found:
            _check_resumable(Path(found), args, identity or {})
        return found

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


def _find(wish: str, output_dir: Path) -> str | None:
    if wish.lower() == "false":
        return None
    if wish.lower() not in ("true", "auto"):
        return _given(Path(wish))
    _put_back(output_dir)
    bad = [f"{folder} ({why})" for folder in sorted(steps(output_dir)) if (why := damage(folder))]
    for found in bad:
        logger.warning("A damaged checkpoint is not resumed from and left alone: %s.", found)
    if done := finished(output_dir):
        return str(done[-1])
    if bad:
        # To start over by oneself would in the end write over what may still be saved by hand.
        raise ValueError(
            f"resume_from_checkpoint={wish} found only damaged checkpoints: {'; '.join(bad)}. To start over, move them away or "
            "choose another output_dir."
        )
    if wish.lower() == "true":
        raise ValueError(
            f"resume_from_checkpoint={wish} found no checkpoint in {output_dir}. Give its path, or 'auto'."
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
        raise ValueError(f"resume_from_checkpoint={str(folder)!r} is no training checkpoint: it has no {STATE}.")
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
        text = "%s was written by %d processes, and this run has %d: order of the data and random numbers will differ."
        logger.warning(text, folder, processes, args.world_size)


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
