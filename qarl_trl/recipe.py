"""Read a recipe and check its keys and values, before the libraries load that act on them.

A recipe is data that people share, so it is read as data: no tags, no aliases, and an `env:` of listed names.
"""

import dataclasses
import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from .redact import redact


# What a recipe's `env:` may set: how libraries run. Not what they load, where they write or whom they talk to.
ENVIRONMENT = (
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_COMPILE_THREADS"),
    *("NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_NVLS_ENABLE"),
    "NCCL_CUMEM_ENABLE",
    *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DOWNLOAD_TIMEOUT"),
    *("WANDB_PROJECT", "WANDB_MODE", "WANDB_NAME", "WANDB_RUN_GROUP", "TRACKIO_PROJECT"),
    *("VLLM_LOGGING_LEVEL", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_ATTN_SPLIT_KV"),
    *("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_MARLIN_USE_ATOMIC_ADD"),
    *("VLLM_DISABLED_KERNELS", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_BATCH_INVARIANT", "VLLM_DISABLE_COMPILE_CACHE"),
)
# Keys of earlier versions.
RENAMED = {"publish_verify": "verify_sync", "publish_folder": "sync_folder", "quant_learner": "quantize_learner"}
# Negative numbers are mistakes, but in fields with a negative default and in these.
MAY_BE_NEGATIVE = ("quant_group_size", "top_k", "save_total_limit", "entropy_coef")
# Text fields for which YAML's words for booleans (on, off, yes, no) also stand.
_WORDS = ("verify_sync", "resume_from_checkpoint", "scale_rewards")


def read_recipe(recipe: Path) -> dict[str, Any]:
    """
    The recipe, on top of the one that its `base:` names (a path from its own folder), with its `env:` exported.

    `ValueError` if it is no YAML mapping, its base has a base, or `env:` sets what a recipe may not.
    """
    content = _load(recipe)
    if "base" in content:
        path = recipe.parent / str(content.pop("base"))
        base = _load(path)
        if "base" in base:
            raise ValueError(f"base of {recipe}: {path} must be a whole recipe, without a base of its own.")
        content = base | content
    _export(recipe, content.pop("env", None) or {})
    return content


def _load(recipe: Path) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(
                yaml.AliasEvent
            ):  # a few hundred, each of a list of others, would be worked on for minutes
                raise yaml.YAMLError("it has an alias, and a flat file needs none")
            return super().compose_node(parent, index)

    if not recipe.is_file():
        raise FileNotFoundError(f"--config {recipe}: there is no such file in {Path.cwd()}.")
    try:
        content = yaml.load(recipe.read_text(), Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"--config {recipe} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {recipe} must be a mapping of keys to values, got {type(content).__name__}.")
    return content


def _export(recipe: Path, env: dict[str, Any]) -> None:
    if not isinstance(env, dict):
        raise ValueError(f"env of {recipe} must be a mapping of names to values, got {type(env).__name__}.")
    if refused := sorted(str(key) for key in env if key not in ENVIRONMENT):
        raise ValueError(
            f"env of {recipe} sets {', '.join(refused)}, and may set only {', '.join(ENVIRONMENT)}. Export it in the shell."
        )
    env = {key: str(value) for key, value in env.items()}
    if env and os.environ.get("RANK", "0") == "0":
        print(f"env of {recipe}:", *(f"{key}={redact(value, key)}" for key, value in env.items()), file=sys.stderr)
    os.environ.update(env)


def check_keys(keys: Iterable[Any], known: Iterable[str]) -> None:
    """Refuse (`ValueError`) keys that are no fields, each with the nearest one that is."""
    known = list(known)
    for key in keys:
        if key not in known:
            near = RENAMED.get(key) or next(iter(difflib.get_close_matches(str(key), known, 1)), None)
            raise ValueError(f"{key} is no key of a recipe." + (f" Did you mean {near}?" if near else ""))


def checked(values: Mapping[str, Any], groups: Iterable[type]) -> dict[str, Any]:
    """
    `values` by field as the types of these dataclasses have them: "1e-5", which YAML reads as text, is a number.

    `ValueError` names the field: of a wrong type, of NaN or infinity, and of a negative number where none can be meant.
    """
    found = {}
    for group in groups:
        hints = get_type_hints(group)
        for field in dataclasses.fields(group):
            if field.name in values:
                found[field.name] = _checked(field, values[field.name], hints[field.name])
    return found


def _checked(field: dataclasses.Field, value: Any, hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    name, default, types = field.name, field.default, str(hint)
    if type(value) is type(default) and value == default:
        return value
    if value is False and name.endswith("_strategy"):  # `save_strategy: no`
        return "no"
    if isinstance(value, bool) and "bool" not in types:
        if name in _WORDS:
            return value
        value = [value]  # pydantic takes it for a number
    if isinstance(value, str) and "list[" in types and "str |" not in types:  # `reward_funcs: math_reward`
        value = [value]
    config = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True, arbitrary_types_allowed=True)
    try:
        value = TypeAdapter(hint, config=config).validate_python(value)
    except ValidationError as error:
        reasons = dict.fromkeys(found["msg"].removeprefix("Input should be ") for found in error.errors())
        raise ValueError(f"{name} must be {', or '.join(reasons)}, got {redact(value, name)!r}.") from None
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}.")
    may_be_negative = name in MAY_BE_NEGATIVE or (isinstance(default, int | float) and default < 0)
    if isinstance(value, int | float) and value < 0 and not may_be_negative:
        raise ValueError(f"{name} must not be negative, got {value}.")
    return value


def construct(group: type, values: Mapping[str, Any]) -> Any:
    """A `group` of its fields in `values`. What its `__post_init__` raises is a `ValueError` that names the field."""
    names = {field.name for field in dataclasses.fields(group)}
    given = {name: value for name, value in values.items() if name in names}
    try:
        return group(**given)
    except Exception as error:
        # transformers' messages do not always name the field, so find the one without which there is no error.
        guilty = [name for name in given if _constructs(group, {k: v for k, v in given.items() if k != name})]
        named = "" if not guilty or any(name in str(error) for name in guilty) else f"{' or '.join(guilty)}: "
        raise ValueError(f"{named}{error}") from error


def _constructs(group: type, values: Mapping[str, Any]) -> bool:
    try:
        group(**values)
    except Exception:
        return False
    return True
