"""`qarl_trl.rollout.engine` without an engine: when a weight sync is checked. The rest runs on a real one, in tests/slow."""

from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from qarl_trl import QaRLTrainer
from qarl_trl.rollout import engine as rollout_engine
from qarl_trl.rollout._vllm_lora import adapter_place
from qarl_trl.rollout.engine import LowBitVLLMGeneration


def generation(order, due=lambda number: True, sleep=False):
    """A `LowBitVLLMGeneration` after one sync, whose engine and sync check write down what they are asked."""
    engine = object.__new__(LowBitVLLMGeneration)
    engine.enable_sleep_mode = engine._llm_weights_sleeping = sleep
    engine.mode, engine.sync_check, engine.num_syncs, engine._checked = "colocate", None, 1, 0
    engine.tensor_parallel_size = 1
    engine._failed = None
    engine.accelerator = SimpleNamespace(num_processes=1, device="cpu", gather=lambda own: own)
    engine.reset_clock()
    engine.llm = SimpleNamespace(wake_up=lambda tags: order.append(f"wake {tags}"))

    def sync_weights():
        order.append("sync")
        engine.num_syncs += 1
        engine.sync_seconds += 1.0
        engine._llm_weights_sleeping = False

    engine.sync_weights = sync_weights
    sync_check = SimpleNamespace(due=due, check=lambda llm, number: order.append(f"check {number}"))
    return engine, sync_check


def test_a_sync_that_is_due_is_checked_once_and_its_time_counted():
    order = []
    engine, sync_check = generation(order, due=lambda number: number in (1, 4))
    for engine.num_syncs in (1, 1, 2, 4):
        engine._check_sync(sync_check)
    assert order == ["check 1", "check 4"] and engine.sync_seconds > 0
    engine.num_syncs = engine._checked = 3
    engine.num_syncs = 5  # the fourth was replaced before anything was sampled
    engine._check_sync(sync_check)
    assert order[2:] == ["check 5"]


def test_a_sleeping_engine_gets_its_weights_and_cache_before_the_check():
    """Level-2 sleep discards the weights, and TRL syncs again only inside `generate`."""
    order = []
    engine, sync_check = generation(order, sleep=True)
    engine._check_sync(sync_check)
    assert order == ["sync", "wake ['kv_cache']", "check 2"]


def test_the_sync_check_sees_the_engine_before_trl_puts_it_to_sleep(monkeypatch):
    """Level-2 sleep would leave nothing to look at."""
    order = []
    llm = SimpleNamespace(sleep=lambda level: order.append(f"sleep {level}"))

    def init_vllm(engine):
        engine.llm = vllm_generation.LLM(seed=0)
        engine.llm.sleep(level=2)

    monkeypatch.setattr(VLLMGeneration, "_init_vllm", init_vllm)
    monkeypatch.setattr(
        vllm_generation, "LLM", lambda **kwargs: order.append(kwargs["load_format"]) or llm, raising=False
    )
    monkeypatch.setattr(rollout_engine, "changed_positions", lambda *args: {})
    monkeypatch.setattr(rollout_engine._vllm_layer, "use_settings_of", lambda llm: None)
    engine, sync_check = generation(order)
    sync_check.look_before = lambda llm: order.append("look")
    engine.model, engine.trust_remote_code = SimpleNamespace(config=None), False
    engine.accelerator, engine.sync_check = SimpleNamespace(num_processes=2), sync_check
    engine.quantization_config, engine.engine_kwargs = None, {}
    engine._init_vllm()
    assert order == ["dummy", "look", "sleep 2"]


@pytest.mark.parametrize("error", [ValueError("no memory"), KeyboardInterrupt("no memory")])
def test_an_engine_in_which_something_failed_is_refused(monkeypatch, error):
    def fail(self, prompts):
        raise error

    engine, _ = generation([])
    monkeypatch.setattr(VLLMGeneration, "generate", fail)
    with pytest.raises(type(error), match="no memory"):
        engine.generate([])
    monkeypatch.setattr(VLLMGeneration, "generate", lambda self, prompts: (prompts, prompts))
    with pytest.raises(RuntimeError, match="A generation of this engine failed earlier"):
        engine.generate([])
    engine._failed = None
    assert engine.generate([]) == ([], [])  # control


def test_what_failed_in_another_process_is_raised_in_this_one_too(monkeypatch):
    engine, _ = generation([])
    engine.accelerator = SimpleNamespace(
        num_processes=2, device="cpu", gather=lambda own: torch.tensor([own[0], True])
    )
    monkeypatch.setattr(VLLMGeneration, "generate", lambda self, prompts: (prompts, prompts))
    with pytest.raises(RuntimeError, match="The generation failed in process 1, which says why"):
        engine.generate([])
    with pytest.raises(RuntimeError, match="failed earlier"):
        engine.generate([])


def test_an_engine_in_a_loop_of_tool_calls_waits_for_nobody(monkeypatch):
    """The loop is as long as a process has tool calls, so another one would answer with its next collective."""
    engine, _ = generation([])
    gathered = []
    gather = lambda own: gathered.append(own) or own  # noqa: E731
    engine.accelerator = SimpleNamespace(num_processes=2, device="cpu", gather=gather)
    monkeypatch.setattr(VLLMGeneration, "generate", lambda self, prompts: (prompts, prompts))
    trainer = object.__new__(QaRLTrainer)
    trainer.use_vllm, trainer.vllm_generation = True, engine
    monkeypatch.setattr(GRPOTrainer, "_tool_call_loop", lambda self, prompts: self.vllm_generation.generate(prompts))
    assert trainer._tool_call_loop([[1]]) == ([[1]], [[1]]) and not gathered
    engine.generate([[1]])
    assert len(gathered) == 1  # control


@pytest.mark.parametrize(
    ("given", "text"), [({}, False), ({"stop": ["#"]}, True), ({"stop": []}, False), ({"detokenize": True}, True)]
)
def test_only_stop_strings_need_text(monkeypatch, given, text):
    """The trainer decodes token ids."""
    monkeypatch.setattr(VLLMGeneration, "__init__", lambda self, **kwargs: vars(self).update(kwargs))
    engine = LowBitVLLMGeneration(quantization_config=None, generation_kwargs=given)
    assert engine.generation_kwargs == given | {"detokenize": text}


def test_an_adapter_goes_to_memory_where_it_fits_and_else_to_disk(monkeypatch):
    model = SimpleNamespace(
        named_parameters=lambda: [("q.lora_A.weight", torch.empty(1000)), ("q.weight", torch.empty(9**6))]
    )
    monkeypatch.setattr("os.path.isdir", lambda path: True)
    for free, place in ((4001, "/dev/shm"), (4000, None)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert adapter_place(model) == place
