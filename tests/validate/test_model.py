"""`qarl_trl.validate.model`: a model of which there is nothing to read is named."""

import pytest
from configs import config

from qarl_trl.validate import config_of


def test_a_model_that_is_nowhere_is_named(tmp_path):
    """transformers says that it cannot connect to the Hub, not for which model."""
    with pytest.raises(OSError, match="model 'runs/no_such_model' is no folder here, and the Hub did not give it: "):
        config_of("runs/no_such_model", config(tmp_path))


def test_a_folder_without_a_config_keeps_transformers_reason(tmp_path):
    # It is a folder here, so our own words would be wrong.
    (tmp_path / "empty").mkdir()

    with pytest.raises((OSError, ValueError)) as error:
        config_of(str(tmp_path / "empty"), config(tmp_path / "run"))
    assert "is no folder here" not in str(error.value)
