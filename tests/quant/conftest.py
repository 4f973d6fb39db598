"""What tests of the compiled kernels share."""

import warnings

import pytest

from qarl_trl.quant import fast


@pytest.fixture
def forgotten(monkeypatch):
    """The kernels are compared anew; a difference is an error unless the test expects it."""
    monkeypatch.setattr(fast, "_AGREES", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
