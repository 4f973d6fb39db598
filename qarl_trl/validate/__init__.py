"""Check what depends on the model, the data or the machine, before models load. `config.py` checks the rest.

Each module has one subject. [`check_run`] calls them all, in the order of their cost.
"""

from .adapters import check_adapter
from .arguments import check_arguments
from .data import check_data
from .folders import check_folders
from .layers import check_head, check_layers, check_plan
from .memory import available_memory, check_host_memory
from .model import config_of, skeleton
from .placement import check_placement
from .rollouts import check_processes
from .run import check_run
from .source import find_source


__all__ = [
    "available_memory",
    "check_adapter",
    "check_arguments",
    "check_data",
    "check_folders",
    "check_head",
    "check_host_memory",
    "check_layers",
    "check_placement",
    "check_plan",
    "check_processes",
    "check_run",
    "config_of",
    "find_source",
    "skeleton",
]
