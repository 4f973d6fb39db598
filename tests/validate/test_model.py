"""`qarl_trl.validate.model`: a model of which there is nothing to read is named."""

import json
from pathlib import Path

import pytest
from configs import config
from conftest import make_model
from peft import LoraConfig

from qarl_trl.validate import check_run, config_of
from qarl_trl.validate.model import check_saved_generation_config, skeleton


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


@pytest.mark.parametrize("as_name", [True, False])
@pytest.mark.parametrize("saves", [True, False])
def test_a_generation_config_that_no_checkpoint_could_hold_is_refused_before_the_run(
    dense_model, tmp_path, as_name, saves
):
    """transformers warns when it reads such a file, and fails when it writes it: at the first checkpoint."""
    model = make_model()
    model.generation_config.temperature = 0.6
    # Control: with sampling the temperature means something.
    model.generation_config.do_sample = saves
    model.config._name_or_path = dense_model
    if as_name:
        model.generation_config.do_sample = True
        model.save_pretrained(tmp_path / "model")
        file = Path(tmp_path / "model" / "generation_config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"do_sample": saves}))
        model = str(tmp_path / "model")

    # Those who save an adapter alone write no such file.
    plain = config(tmp_path / "plain", quant_scheme="none", loss_type="dapo")
    check_run(model, plain, {"model": model, "peft_config": LoraConfig(target_modules=["q_proj"])})
    if saves:
        check_saved_generation_config(model, config(tmp_path / "run"))
        return
    with pytest.raises(ValueError, match="temperature.* Set do_sample to true"):
        check_run(model, config(tmp_path / "run"), {"model": model})


def test_a_pad_token_that_the_trainer_replaces_is_not_refused(tmp_path):
    model = make_model()
    model.generation_config.pad_token_id = -1

    check_saved_generation_config(model, config(tmp_path))


def test_a_vocabulary_without_tokens_is_refused_by_its_name(tmp_path):
    settings = make_model().config
    skeleton(settings, config(tmp_path))  # control

    settings.vocab_size = 0
    with pytest.raises(ValueError, match="vocab_size in the model's config.json must be above 0, got 0"):
        skeleton(settings, config(tmp_path))
