"""`qarl_trl.validate.schedule`: a schedule that cannot be made is refused before a model loads."""

import pytest
import torch
from configs import config
from transformers import SchedulerType, get_constant_schedule

from qarl_trl.validate import check_arguments


# What the types need that cannot be made without.
NEEDED = {
    "cosine_with_min_lr": {"min_lr": 1e-7},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-7},
    "warmup_stable_decay": {"num_decay_steps": 2},
}
# They go by the metric of an evaluation: the config refuses one, and transformers wants evaluations for the other.
BY_METRIC = ("reduce_lr_on_plateau", "greedy")


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [("cosine_with_min_lr", None), ("linear", {"foo": 1}), ("polynomial", {"lr_end": 1.0})],
)
def test_a_schedule_that_transformers_cannot_make_is_refused(tmp_path, kind, kwargs):
    args = config(tmp_path, lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs)
    with pytest.raises(ValueError, match=f"lr_scheduler_kwargs must be those of lr_scheduler_type='{kind}', got"):
        check_arguments("org/model", args, {})

    # Control: the schedule of a script takes its place.
    optimizer = torch.optim.SGD([torch.zeros(1)])
    check_arguments("org/model", args, {"optimizers": (optimizer, get_constant_schedule(optimizer))})


@pytest.mark.parametrize("steps", [-1, 3])
@pytest.mark.parametrize("kind", [kind.value for kind in SchedulerType if kind.value not in BY_METRIC])
def test_every_schedule_of_transformers_is_accepted(tmp_path, kind, steps):
    settings = {"lr_scheduler_kwargs": NEEDED.get(kind), "warmup_steps": 5, "max_steps": steps}

    check_arguments("org/model", config(tmp_path, lr_scheduler_type=kind, **settings), {"optimizers": (None, None)})
