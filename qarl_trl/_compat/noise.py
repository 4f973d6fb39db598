"""Messages of other libraries that mislead."""

import logging


# vllm/triton_utils/importing.py
TRITON_LOGGER = "vllm.triton_utils.importing"


def silence_triton_without_gpu() -> None:
    """
    Drop vLLM's warnings that it disables Triton, where torch has no GPU.

    Triton only serves GPUs here, and a user on a CPU has nothing to mend. With a torch for GPUs they stay: there they
    mean that kernels are missing.
    """
    logging.getLogger(TRITON_LOGGER).addFilter(_is_worth_a_line)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    # vLLM has loaded torch when it logs this; `qarl-trl --help` must not.
    import torch

    has_gpu = torch.version.cuda is not None or torch.version.hip is not None
    return has_gpu or "Disabling Triton" not in record.getMessage()
