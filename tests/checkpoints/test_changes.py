"""The table of settings that a resumed run compares: each setting of a run is in it, and is treated as it says."""

import copy
import dataclasses
import functools
import itertools
import json
from enum import Enum
from types import SimpleNamespace

import pytest
from configs import config
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, KTOConfig

from qarl_trl import LowBitConfig, LowBitDistillationConfig, LowBitRLOOConfig, LowBitSFTConfig, QaRLConfig
from qarl_trl.checkpoints.changes import RULES, SETTINGS_BY_RULE, Rule, compared_settings
from qarl_trl.checkpoints.identity import PACKERS, SETTINGS, identity_of
from qarl_trl.checkpoints.resume import resume_path
from qarl_trl.checkpoints.same_run import WITHIN_BATCH, changed_settings
from qarl_trl.learner.attention import use_packed_attention
from qarl_trl.quant import apply_quantization

from .test_folder import write


CONFIGS = (QaRLConfig, LowBitSFTConfig, LowBitRLOOConfig, LowBitDistillationConfig)
FIELDS = [(kind, field.name) for kind in CONFIGS for field in dataclasses.fields(kind)]
# Values of a form that the setting's default does not show.
SPECIAL = {
    "model_init_kwargs": {"attn_implementation": "eager"},
    "teacher_model_init_kwargs": {"dtype": "bfloat16"},
}


@functools.cache
def before_of(kind):
    """The settings of the checkpoint's run."""
    return config("before", kind)


@pytest.fixture(scope="module")
def before():
    """The same of a QaRL run."""
    return before_of(QaRLConfig)


def test_what_trl_writes_into_the_config_of_a_stream_is_no_change(before):
    args = copy.deepcopy(before)
    args.accelerator_config.dispatch_batches = False
    assert compared_settings(args) == compared_settings(before)

    # Control: another value is one.
    args.accelerator_config.even_batches = not args.accelerator_config.even_batches
    assert compared_settings(args) != compared_settings(before)


def other(value):
    """Another value, of the same type where there is one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next(one for one in type(value) if one != value)
    if isinstance(value, int | float):
        return value * 2 + 3
    if isinstance(value, list):
        return [*value, "another"]
    if isinstance(value, dict):
        return value | {"another": 1}
    return "another"


def identity(args):
    """Facts as a manifest has them."""
    # A way through JSON turns tuples into lists and enums into strings, which must not look like changes.
    return json.loads(json.dumps(identity_of("a", args, None, {})))


def test_each_setting_of_a_run_is_in_the_table_once():
    """A new version of TRL has new settings: somebody must say what a resumed run does with them."""
    listed = list(itertools.chain.from_iterable(SETTINGS_BY_RULE.values()))

    # Lists, not sets: a setting under two rules would be a contradiction.
    assert sorted(listed) == sorted({name for _, name in FIELDS})


@pytest.mark.parametrize("within_batch", [False, True], ids=["at a batch's end", "within a batch"])
@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_changed_setting_is_treated_as_the_table_says(tmp_path, kind, name, within_batch):
    before = before_of(kind)
    now = copy.copy(before)
    # Past `__post_init__`: many settings do not go with the others, and the table does not ask.
    vars(now)[name] = SPECIAL.get(name) or other(getattr(before, name))
    folder = write(tmp_path, 1, **identity(before) | {WITHIN_BATCH: within_batch})

    rule = RULES[name]
    if (kind, name) == (LowBitDistillationConfig, "beta"):
        # Not the weight of a penalty: a divergence from the other side is another loss.
        rule = Rule.REFUSED
    refused = rule is Rule.REFUSED or (rule is Rule.BETWEEN_BATCHES and within_batch)
    said = [change.name for change in changed_settings(folder, identity(now))]

    if refused:
        with pytest.raises(ValueError, match=name):
            resume_path(str(folder), now, identity(now))
    else:
        assert resume_path(str(folder), now, identity(now)) == str(folder)
    # Whatever a run does with a change, it is listed, unless it is free.
    assert said == ([] if rule is Rule.FREE else [name])


@pytest.mark.parametrize("packing", [False, True])
def test_processes_that_pack_rows_stay_because_each_packs_a_part_of_them(tmp_path, packing):
    args = config(tmp_path, LowBitSFTConfig, packing=packing)
    folder = write(tmp_path, 1, **identity(args))
    now = copy.copy(args)
    # As none.
    now.dataset_num_proc = 1
    assert resume_path(str(folder), now, identity(now)) == str(folder)

    now.dataset_num_proc = 2
    # Earlier versions had the number among the settings.
    facts = identity(args)
    facts.pop(PACKERS, None)
    facts["settings"]["dataset_num_proc"] = None
    earlier = write(tmp_path, 2, **facts)

    for checkpoint in (folder, earlier):
        if packing:
            with pytest.raises(ValueError, match="made its rows with dataset_num_proc=1, got 2"):
                resume_path(str(checkpoint), now, identity(now))
        else:
            assert resume_path(str(checkpoint), now, identity(now)) == str(checkpoint)


def test_unchanged_settings_are_no_change(tmp_path):
    """Control: also after a way through JSON."""
    args = config(tmp_path, generation_kwargs={"stop": ["a"]}, model_init_kwargs={"dtype": "float32"})
    folder = write(tmp_path, 1, **identity(args))

    assert changed_settings(folder, identity(args)) == []
    assert resume_path(str(folder), args, identity(args))
    # TRL's default dtype, by name.
    assert changed_settings(folder, identity(config(tmp_path, generation_kwargs={"stop": ["a"]}))) == []


def test_a_setting_that_the_table_does_not_have_is_refused(tmp_path):
    """As those of other TRL trainers: nobody has said that it changes nothing."""
    args = config(tmp_path)
    folder = write(tmp_path, 1, **identity(args))
    facts = identity(args)
    assert "use_weighting" not in RULES

    # TRL's DPO has it. It is put into both sides by hand, because no run of this config would write it.
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[SETTINGS]["use_weighting"] = False
    (folder / "manifest.json").write_text(json.dumps(manifest))
    facts[SETTINGS]["use_weighting"] = True

    with pytest.raises(ValueError, match="use_weighting was False there, and is True"):
        resume_path(str(folder), args, facts)


@dataclasses.dataclass
class PairingConfig(LowBitConfig, KTOConfig):
    """A user's. TRL pairs the rows of a batch."""


@dataclasses.dataclass
class RowByRowConfig(LowBitConfig, DPOConfig):
    """A user's. TRL makes each row of one row."""


def test_processes_may_change_where_each_row_is_made_of_one(tmp_path):
    args = config(tmp_path, RowByRowConfig)
    folder = write(tmp_path, 1, **identity(args))
    args.dataset_num_proc = 2

    assert resume_path(str(folder), args, identity(args)) == str(folder)


def test_processes_stay_where_nobody_knows_that_rows_are_made_one_by_one(tmp_path):
    args = config(tmp_path, PairingConfig)
    folder = write(tmp_path, 1, **identity(args))
    args.dataset_num_proc = 2

    with pytest.raises(ValueError, match="dataset_num_proc=1, got 2"):
        resume_path(str(folder), args, identity(args))


def test_under_deepspeed_the_settings_of_the_optimizer_must_stay(tmp_path):
    args = config(tmp_path)
    folder = write(tmp_path, 1, **identity(args))
    now = copy.copy(args)
    now.learning_rate = 1.0
    # Control: without DeepSpeed it is applied.
    assert resume_path(str(folder), now, identity(now))

    args.deepspeed_plugin = SimpleNamespace(zero_stage=2)
    now.deepspeed_plugin = args.deepspeed_plugin
    folder = write(tmp_path, 2, **identity(args))
    with pytest.raises(ValueError, match="learning_rate was .*Under DeepSpeed"):
        resume_path(str(folder), now, identity(now))


def rows(*prompts):
    return Dataset.from_list([{"prompt": prompt, "answer": "1"} for prompt in prompts])


# Another row, another order, and one row less.
@pytest.mark.parametrize("others", [rows("a", "b", "d"), rows("a", "c", "b"), rows("a", "b")])
def test_other_rows_are_another_run(tmp_path, others):
    args = config(tmp_path)
    arguments = {"train_dataset": rows("a", "b", "c")}
    folder = write(tmp_path, 1, **identity_of("a", args, None, arguments))

    # Control: the same rows in another object.
    # With indices over another table, and so with another fingerprint of `datasets`.
    same = {"train_dataset": rows("x", "a", "b", "c").select([1, 2, 3])}
    assert resume_path(str(folder), args, identity_of("a", args, None, same))
    with pytest.raises(ValueError, match="another run: data was"):
        resume_path(str(folder), args, identity_of("a", args, None, {"train_dataset": others}))


def test_master_weights_of_another_dtype_are_another_run(dense_model, tmp_path):
    args = config(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(dense_model, dtype="float32")
    folder = write(tmp_path, 1, **identity_of(model, args, None, {}))

    assert resume_path(str(folder), args, identity_of(model, args, None, {}))  # control
    with pytest.raises(ValueError, match="model_init_kwargs was .*float32.*, and is .*bfloat16"):
        resume_path(str(folder), args, identity_of(model.bfloat16(), args, None, {}))


def test_a_loaded_model_of_another_config_is_another_run(dense_model, tmp_path):
    """A script may change it after it loaded the model, and its files know nothing of that."""
    args = config(tmp_path)

    def trained_by_a_trainer(model):
        apply_quantization(model, args.quant_plan())
        use_packed_attention(model)

    def facts(rope_theta=None, attention="sdpa", ends=1, rewards=(len,), trained=False):
        model = AutoModelForCausalLM.from_pretrained(dense_model, dtype="float32", attn_implementation=attention)
        model.config.use_cache = not model.config.use_cache  # changes no policy
        if trained:
            trained_by_a_trainer(model)
        if rope_theta is not None:
            model.config.rope_parameters["rope_theta"] = rope_theta
        model.generation_config.eos_token_id = ends
        return identity_of(model, args, None, {"reward_funcs": list(rewards)})

    folder = write(tmp_path, 1, **facts())

    assert resume_path(str(folder), args, facts())  # control
    # A script may give a model to one trainer, and then to another.
    assert resume_path(str(folder), args, facts(trained=True))
    for words, others in [
        ("rope_parameters in the config of the loaded model was .*, and is .*100.0", {"rope_theta": 100.0}),
        ("attention in the config of the loaded model was 'sdpa', and is 'eager'", {"attention": "eager"}),
        (r"end_tokens_of_model was \[1\].*, and is \[1, 2\]", {"ends": [1, 2]}),
    ]:
        with pytest.raises(ValueError, match=f"another run: {words}"):
            resume_path(str(folder), args, facts(**others))


def upper(batch):
    return {"prompt": [text.upper() for text in batch["prompt"]]}


def test_rows_that_are_shown_through_another_function_are_another_run(tmp_path):
    args = config(tmp_path)

    def facts(data):
        return identity_of("a", args, None, {"train_dataset": data})

    folder = write(tmp_path, 1, **facts(rows("a", "b").with_transform(upper)))

    assert resume_path(str(folder), args, facts(rows("a", "b").with_transform(upper)))  # control
    with pytest.raises(ValueError, match="another run: transform was '.*upper'.*and is 'none'"):
        resume_path(str(folder), args, facts(rows("a", "b")))
