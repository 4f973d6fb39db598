"""Check a run before its model loads: [`check_run`] calls all checks, in the order of their cost.

`trainers/settings.py` and `config.py` refuse what is wrong in the settings alone. These checks also need the trainer's
other arguments, the model, the data or the machine. Each module has one subject.
"""

from .arguments import check_arguments
from .data import check_data
from .layers import check_head
from .model import config_of, skeleton
from .run import check_run


__all__ = [
    "check_arguments",
    "check_data",
    "check_head",
    "check_run",
    "config_of",
    "skeleton",
]
