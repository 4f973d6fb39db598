"""Messages of other libraries that mislead are dropped where they do, and only there."""

import logging

import pytest
import torch

from qarl_trl._compat.noise import TRITON_LOGGER


# The words of vllm/triton_utils/importing.py, of which the filter looks for "Disabling Triton".
DISABLED = "Triton is installed, but doesn't include CPU backend. Disabling Triton."


@pytest.fixture
def lines(caplog):
    """Log one message as vLLM does; what is left of it."""

    def log(message: str) -> list[str]:
        logger = logging.getLogger(TRITON_LOGGER)
        # vLLM's loggers do not propagate once it has loaded, and caplog listens at the root.
        logger.addHandler(caplog.handler)
        logger.warning(message)
        logger.removeHandler(caplog.handler)
        return caplog.messages

    return log


def test_without_a_gpu_nobody_reads_that_triton_is_disabled(lines, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert lines(DISABLED) == []


# The two controls of the test above: another text, and a torch for GPUs, where the message means missing kernels.
def test_other_messages_stay(lines, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "Triton kernel failed" in lines("Triton kernel failed")


def test_with_a_gpu_the_message_stays(lines, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert DISABLED in lines(DISABLED)
