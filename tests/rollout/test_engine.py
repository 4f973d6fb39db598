"""`qarl_trl.rollout.engine` without an engine. The rest runs on a real one, in tests/slow."""

from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from qarl_trl import QaRLTrainer
from qarl_trl.rollout import engine as rollout_engine
from qarl_trl.rollout import engine_settings
from qarl_trl.rollout.engine import LowBitVLLMGeneration, _WeightsToSend
from qarl_trl.rollout.vllm.adapters import adapter_place


def generation(order, due=lambda number: True, sleep=False):
    """A `LowBitVLLMGeneration` after one sync, and a sync check. Both write down in `order` what they are asked."""
    engine = object.__new__(LowBitVLLMGeneration)
    engine.mode = "colocate"
    engine.tensor_parallel_size = 1
    engine.enable_sleep_mode = sleep
    engine._llm_weights_sleeping = sleep
    engine.sync_check = None
    engine.num_syncs = 1
    engine._failed = None
    engine.accelerator = SimpleNamespace(num_processes=1, device="cpu", gather=lambda row: row)
    engine.llm = SimpleNamespace(wake_up=lambda tags: order.append(f"wake {tags}"))
    engine.reset_clock()

    def sync_weights():
        order.append("sync")
        engine.num_syncs += 1
        engine.sync_seconds += 1.0
        engine._llm_weights_sleeping = False

    engine.sync_weights = sync_weights
    sync_check = SimpleNamespace(due=due, check=lambda llm, number: order.append(f"check {number}"))
    return engine, sync_check


def let_trl_return_the_prompts(monkeypatch):
    """As token ids and as completions."""
    monkeypatch.setattr(VLLMGeneration, "generate", lambda self, prompts: (prompts, prompts))


# The sync check -------------------------------------------------------------------------------------------------


def test_a_sync_that_is_due_is_checked_in_it_and_its_time_counted():
    """Not in `generate`, which a `rollout_func` need not call."""
    order = []
    engine, sync_check = generation(order, due=lambda number: number in (1, 3))
    del engine.sync_weights
    engine.sync_check = sync_check
    engine.num_syncs = 0
    engine._iter_named_params = lambda: iter([("a", torch.zeros(2))])
    engine._send = lambda weights: order.append("send")

    for _ in range(4):
        engine.sync_weights()

    assert order == ["send", "check 1", "send", "send", "check 3", "send"]
    assert engine.sync_seconds > 0
    assert engine.synced_bytes == 8


def test_a_failed_check_refuses_the_engine():
    engine, sync_check = generation([])
    del engine.sync_weights

    def fail(*_):
        raise RuntimeError("stale")

    sync_check.check = fail
    engine.sync_check = sync_check
    engine._iter_named_params = lambda: iter([])
    engine._send = lambda weights: None

    with pytest.raises(RuntimeError, match="stale"):
        engine.sync_weights()
    with pytest.raises(RuntimeError, match="A sync check of this engine failed earlier"):
        engine.sync_weights()


def test_a_sleeping_engine_gets_its_weights_and_cache_before_the_check(monkeypatch):
    """Level-2 sleep discards the weights."""
    order = []
    engine, sync_check = generation(order, sleep=True)
    monkeypatch.setattr(rollout_engine, "clear_device_cache", lambda: None)
    del engine.sync_weights
    engine.sync_check = sync_check
    engine._iter_named_params = lambda: iter([])
    engine._send = lambda weights: order.append("send")

    engine.sync_weights()

    assert order == ["wake ['weights']", "send", "wake ['kv_cache']", "check 2"]


def test_the_sync_check_sees_the_engine_before_trl_puts_it_to_sleep(monkeypatch):
    """Level-2 sleep would leave nothing to look at."""
    order = []
    llm = SimpleNamespace(sleep=lambda level: order.append(f"sleep {level}"))

    def make_llm(**kwargs):
        order.append(kwargs["load_format"])
        return llm

    def init_vllm(engine):
        engine.llm = vllm_generation.LLM(seed=0)
        engine.llm.sleep(level=2)

    monkeypatch.setattr(vllm_generation, "LLM", make_llm, raising=False)
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", init_vllm)
    monkeypatch.setattr(engine_settings, "changed_config", lambda *args: {})
    monkeypatch.setattr(rollout_engine.linear_layer, "use_settings_of", lambda llm: None)

    engine, sync_check = generation(order)
    sync_check.look_before = lambda llm: order.append("look")
    engine.sync_check = sync_check
    engine.model = SimpleNamespace(config=None)
    engine.trust_remote_code = False
    engine.accelerator = SimpleNamespace(num_processes=2, process_index=1)
    engine.quantization_config = None
    engine.engine_kwargs = {}
    engine.seed = 5
    engine._init_vllm()

    assert order == ["dummy", "look", "sleep 2"]


@pytest.mark.parametrize(("ranks", "seeds"), [(1, [12, 13, 14, 15]), (2, [6, 6, 7, 7]), (4, [3, 3, 3, 3])])
def test_every_engine_of_every_run_has_a_seed_of_its_own(monkeypatch, ranks, seeds):
    """TRL gives the engines of all runs the numbers 0, 1, ..., so that runs with two seeds would share draws."""
    taken = []
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: taken.append(kwargs["seed"]), raising=False)
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda engine: vllm_generation.LLM(seed=0))
    monkeypatch.setattr(engine_settings, "changed_config", lambda *args: {})
    monkeypatch.setattr(rollout_engine.linear_layer, "use_settings_of", lambda llm: None)
    engine, _ = generation([])
    engine.llm = engine.sync_check = None
    engine.model = SimpleNamespace(config=None)
    engine.trust_remote_code = False
    engine.quantization_config = None
    engine.engine_kwargs = {}
    engine.tensor_parallel_size = ranks
    engine.seed = 3

    for process in range(4):
        engine.accelerator = SimpleNamespace(num_processes=4, process_index=process)
        engine._init_vllm()

    assert taken == seeds


# Failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("no memory"), KeyboardInterrupt("no memory")])
def test_an_engine_in_which_something_failed_is_refused(monkeypatch, error):
    def fail(self, prompts):
        raise error

    engine, _ = generation([])
    monkeypatch.setattr(VLLMGeneration, "generate", fail)
    with pytest.raises(type(error), match="no memory"):
        engine.generate([])

    let_trl_return_the_prompts(monkeypatch)
    with pytest.raises(RuntimeError, match="A generation of this engine failed earlier"):
        engine.generate([])

    # Control: without the mark it would answer.
    engine._failed = None
    assert engine.generate([]) == ([], [])


def test_what_failed_in_another_process_is_raised_in_this_one_too(monkeypatch):
    def gather(row):
        return torch.tensor([row[0], True])

    engine, _ = generation([])
    engine.accelerator = SimpleNamespace(num_processes=2, device="cpu", gather=gather)
    let_trl_return_the_prompts(monkeypatch)

    with pytest.raises(RuntimeError, match="The generation failed in process 1, which says why"):
        engine.generate([])
    with pytest.raises(RuntimeError, match="failed earlier"):
        engine.generate([])


def test_an_engine_in_a_loop_of_tool_calls_waits_for_nobody(monkeypatch):
    """The loop is as long as a process has tool calls, so another one would answer with its next collective."""
    gathered = []

    def gather(row):
        gathered.append(row)
        return row

    engine, _ = generation([])
    engine.accelerator = SimpleNamespace(num_processes=2, device="cpu", gather=gather)
    let_trl_return_the_prompts(monkeypatch)
    monkeypatch.setattr(GRPOTrainer, "_tool_call_loop", lambda self, prompts: self.vllm_generation.generate(prompts))
    trainer = object.__new__(QaRLTrainer)
    trainer.use_vllm = True
    trainer.vllm_generation = engine

    assert trainer._tool_call_loop([[1]]) == ([[1]], [[1]])
    assert not gathered

    # Control: outside of the loop it waits.
    engine.generate([[1]])
    assert len(gathered) == 1


def some_weights(read):
    """Three weights; `read` gets the names of those that were asked for."""
    for name in ("a", "b", "c"):
        read.append(name)
        yield name, torch.zeros(1)


def test_a_process_whose_send_failed_still_reads_all_weights():
    """The other processes gather them together with this one."""
    read = []
    weights = _WeightsToSend(some_weights(read))

    with pytest.raises(ValueError, match="no memory"), weights.read_to_the_end():
        next(iter(weights))
        raise ValueError("no memory")
    assert read == ["a", "b", "c"]
    assert weights.bytes_read == 3 * 4

    # Control: Ctrl-C stops at once.
    read.clear()
    weights = _WeightsToSend(some_weights(read))
    with pytest.raises(KeyboardInterrupt), weights.read_to_the_end():
        next(iter(weights))
        raise KeyboardInterrupt
    assert read == ["a"]


def test_a_process_that_sends_nothing_reads_all_weights():
    read = []

    with _WeightsToSend(some_weights(read)).read_to_the_end():
        pass

    assert read == ["a", "b", "c"]


def test_the_error_of_a_send_stays_visible_if_reading_fails_too():
    def broken():
        raise KeyError("gather")
        yield

    with pytest.raises(KeyError, match="gather") as failure, _WeightsToSend(broken()).read_to_the_end():
        raise ValueError("no memory")

    assert isinstance(failure.value.__context__, ValueError)


# Settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [({}, False), ({"stop": ["#"]}, True), ({"stop": []}, False), ({"detokenize": True}, True)],
)
def test_only_stop_strings_need_text(monkeypatch, settings, text):
    """The trainer decodes token ids."""
    monkeypatch.setattr(VLLMGeneration, "__init__", lambda self, model, **kwargs: vars(self).update(kwargs))

    engine = LowBitVLLMGeneration(None, quantization_config=None, mode="server", generation_kwargs=settings)

    assert engine.generation_kwargs == settings | {"detokenize": text, "stop_token_ids": []}


def test_only_a_colocated_engine_is_asked_for_flat_log_probs(monkeypatch):
    """A server answers by HTTP, with TRL's own fields."""
    monkeypatch.setattr(VLLMGeneration, "__init__", lambda self, model, **kwargs: vars(self).update(kwargs))

    def flat(mode):
        engine = LowBitVLLMGeneration(None, quantization_config=None, mode=mode, generation_kwargs={})
        return engine.generation_kwargs.get("flat_logprobs")

    assert flat("colocate") is True
    assert flat("server") is None


def test_a_users_stop_tokens_are_added_to_the_trainers(monkeypatch):
    monkeypatch.setattr(VLLMGeneration, "__init__", lambda self, model, **kwargs: vars(self).update(kwargs))
    settings = {"stop_token_ids": [7, 3]}

    engine = LowBitVLLMGeneration(
        None, quantization_config=None, mode="colocate", stop_token_ids=[2, 7], generation_kwargs=settings
    )

    assert engine.generation_kwargs["stop_token_ids"] == [2, 7, 3]


# 1000 numbers of 2 bytes, twice.
@pytest.mark.parametrize(("free", "place"), [(4001, "/dev/shm"), (4000, None)])
def test_an_adapter_goes_to_memory_where_it_fits_and_else_to_disk(monkeypatch, free, place):
    parameters = [("q.lora_A.weight", torch.empty(1000)), ("q.weight", torch.empty(9**6))]
    model = SimpleNamespace(named_parameters=lambda: parameters)
    monkeypatch.setattr("os.path.isdir", lambda path: True)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))

    assert adapter_place(model) == place


@pytest.mark.parametrize(
    ("settings", "of_trainer", "stops"),
    [
        ({"ignore_eos": True}, [2], []),  # vLLM stops at stop tokens all the same
        ({"ignore_eos": True, "stop_token_ids": [5]}, [2], [5]),
        ({}, [None, 2], [2]),  # a tokenizer without an EOS token
    ],
)
def test_which_tokens_end_an_answer(monkeypatch, settings, of_trainer, stops):
    monkeypatch.setattr(VLLMGeneration, "__init__", lambda self, model, **kwargs: vars(self).update(kwargs))

    engine = LowBitVLLMGeneration(
        None, quantization_config=None, mode="colocate", stop_token_ids=of_trainer, generation_kwargs=settings
    )

    assert engine.generation_kwargs["stop_token_ids"] == stops
