"""An optimizer and its schedule in a resumed run: the settings are the run's, the state is that of the checkpoint."""

from __future__ import annotations

import hashlib
from typing import Any

from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ..quant.names import plain_name


# What a schedule computes from, and what it computed last.
_RATES = ("lr", "initial_lr")

logger = get_logger(__name__)


def say_if_of_another_model(optimizer: Any, model: nn.Module) -> None:
    """
    Warn of an optimizer that has none of the parameters that a model trains: a run would look like training.

    It is not refused: an optimizer may keep copies in float32 of its own.

    Args:
        optimizer: A script's, or `None`. That of DeepSpeed has no groups.
        model: The model, with whole parameters.
    """
    of_optimizer: set[int] = set()
    for group in getattr(optimizer, "param_groups", ()):
        of_optimizer.update(map(id, group["params"]))
    if not of_optimizer:
        return

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if of_optimizer.isdisjoint(map(id, trained)):
        logger.warning(
            "The optimizer in `optimizers` has none of the parameters that the model trains, so its steps may "
            "change nothing. It was made of another model, or before the trainer made the adapter of peft_config: "
            "give the trainer a model, or a PeftModel, and an optimizer of its parameters."
        )


def trained_fact(optimizer: Any, model: nn.Module) -> str:
    """
    The number of parameters that an optimizer trains, and a digest of their names and order.

    A checkpoint has the state of an optimizer by place. With other parameters of the same shapes, as another frozen
    layer leaves them, each would continue with the state of another one.

    Args:
        optimizer: An optimizer, also one that accelerate wraps.
        model: The model. A parameter that it does not have, as ZeRO's flat ones, has no name.
    """
    # A resumed run may have another setting of activation checkpointing.
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    trained = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    content = hashlib.sha256(repr(trained).encode()).hexdigest()[:16]
    return f"{sum(map(len, trained))} parameters, {content}"


def class_fact(optimizer: Any) -> str:
    """
    The name of an optimizer's class.

    Args:
        optimizer: An optimizer, also one that accelerate wraps.
    """
    plain = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return type(plain).__name__


def made_fact(optimizer: Any) -> list[dict[str, str]]:
    """
    What an optimizer has in its groups when it is made, as texts by name, for the manifest of a checkpoint.

    Some optimizers count in their groups (Prodigy, D-Adaptation, the schedule-free ones). In a resumed run their
    counters start again, as settings that changed would; what each began with tells the two apart.

    Args:
        optimizer: An optimizer before its first step, also one that accelerate wraps.
    """
    made = []
    for group in settings_of_groups(optimizer):
        made.append({name: repr(value) for name, value in group.items()})
    return made


def settings_of_groups(optimizer: Any) -> list[dict[str, Any]]:
    """
    What an optimizer has in its groups beside the parameters: rate, weight decay, betas and so on.

    Args:
        optimizer: An optimizer, also one that accelerate wraps.

    Returns:
        The settings of each group, by name.
    """
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def changed_settings_of_groups(
    settings: list[dict[str, Any]], before: list[dict[str, str]] | None, now: list[dict[str, str]] | None
) -> list[dict[str, Any]]:
    """
    The settings that a run must give to the groups of its loaded optimizer. What both runs began with is left out: the
    checkpoint has it, or a counter that began so.

    Args:
        settings: Those of the run, from [`settings_of_groups`].
        before: What the optimizer of the checkpoint began with, from [`made_fact`]; `None`: an earlier version did
            not write it, and all settings are given.
        now: What the optimizer of the run began with; `None` if nobody noted it.

    Returns:
        Settings of each group, by name. Rates are always among them.
    """
    if before is None or now is None:
        return settings

    changed = []
    for of_run, began, begins in zip(settings, before, now, strict=True):
        kept = {name for name in begins if name not in _RATES and began.get(name) == begins[name]}
        changed.append({name: value for name, value in of_run.items() if name not in kept})
    return changed


def apply_settings(settings: list[dict[str, Any]], optimizer: Any, schedule: Any) -> None:
    """
    Give an optimizer and its schedule, which were loaded from a checkpoint, the settings of the run that resumes.

    Unchanged settings give the learning rate of the checkpoint, bit for bit.

    Args:
        settings: Those of the run, from [`changed_settings_of_groups`].
        optimizer: The optimizer, with the state of the checkpoint.
        schedule: The schedule, at the step of the checkpoint.

    Raises:
        ValueError: if rate or weight decay changed, and the schedule cannot be computed anew.
    """
    if not isinstance(schedule, LambdaLR):
        # It computes each rate from the one before.
        _refuse_changes(settings, optimizer)
        return

    for group, of_run in zip(optimizer.param_groups, settings, strict=True):
        # Their `lr` is the rate of the first step. The loop below computes that of the checkpoint's step.
        group.update(of_run)

    # As `LambdaLR.step` computes them, by the run's function and not the checkpoint's.
    schedule.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    rates = []
    for group, base, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * factor(schedule.last_epoch)
        rates.append(group["lr"])
    schedule._last_lr = rates


def _refuse_changes(settings: list[dict[str, Any]], optimizer: Any) -> None:
    """Refuse (`ValueError`) settings that differ from the loaded ones, but for the rate of the moment."""
    for group, of_run in zip(optimizer.param_groups, settings, strict=True):
        for name, value in of_run.items():
            if name != "lr" and group.get(name) != value:
                raise ValueError(
                    f"{name} was {group.get(name)} in the checkpoint, and is {value}: this schedule cannot take a new "
                    "one. Set it back, or use another lr_scheduler_type in a new run."
                )
