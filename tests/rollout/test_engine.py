"""`qarl_trl.rollout.engine` without an engine. The rest runs on a real one, in tests/slow."""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from qarl_trl import QaRLTrainer, guards
from qarl_trl.rollout import engine as rollout_engine
from qarl_trl.rollout import engine_settings
from qarl_trl.rollout.engine import LowBitVLLMGeneration


def generation(order=None, sleep=False, due=lambda number: True):
    """
    A `LowBitVLLMGeneration` after one sync, with a sync check. No vLLM is behind it.

    `order` gets what it does: "send", "check 2", "wake ...".
    """
    order = [] if order is None else order

    # Past TRL's constructor, which would start vLLM.
    engine = object.__new__(LowBitVLLMGeneration)
    engine.mode = "colocate"
    engine.tensor_parallel_size = 1
    engine.enable_sleep_mode = sleep
    engine._llm_weights_sleeping = sleep
    engine.num_syncs = 1
    engine._failed = None
    engine.accelerator = SimpleNamespace(num_processes=1, device="cpu", gather=lambda row: row)
    engine.llm = SimpleNamespace(wake_up=lambda tags: order.append(f"wake {tags}"))
    engine.reset_clock()

    # Two float32 numbers: a sync has 8 bytes.
    engine._iter_named_params = lambda: iter([("a", torch.zeros(2))])
    engine._send = lambda weights: order.append("send")
    engine.sync_check = SimpleNamespace(
        due=due,
        look_before=lambda engine_logps: order.append("look"),
        check=lambda engine_logps, number: order.append(f"check {number}"),
    )
    return engine


def let_trl_return_the_prompts(monkeypatch):
    """As token ids and as completions."""
    monkeypatch.setattr(VLLMGeneration, "generate", lambda self, prompts: (prompts, prompts))


# Settings -------------------------------------------------------------------------------------------------------


def parameters(monkeypatch, of_user, mode="colocate", of_trainer=()):
    """What the engine adds to vLLM's `SamplingParams`, with the `generation_kwargs` of a user."""
    # TRL's constructor keeps its arguments as attributes, and then starts the engine.
    monkeypatch.setattr(VLLMGeneration, "__init__", lambda self, model, **kwargs: vars(self).update(kwargs))
    engine = LowBitVLLMGeneration(
        None, quantization_config=None, mode=mode, stop_token_ids=of_trainer, generation_kwargs=of_user
    )
    return engine.generation_kwargs


@pytest.mark.parametrize(
    ("of_user", "text"),
    [({}, False), ({"stop": ["#"]}, True), ({"stop": []}, False), ({"detokenize": True}, True)],
)
def test_only_stop_strings_need_text(monkeypatch, of_user, text):
    """The trainer decodes token ids."""
    added = {"detokenize": text, "stop_token_ids": [], "ignore_eos": True}

    assert parameters(monkeypatch, of_user, mode="server") == of_user | added


def test_only_a_colocated_engine_is_asked_for_flat_log_probs(monkeypatch):
    """A server answers by HTTP, with TRL's own fields."""
    assert parameters(monkeypatch, {}, mode="colocate")["flat_logprobs"] is True
    assert "flat_logprobs" not in parameters(monkeypatch, {}, mode="server")


@pytest.mark.parametrize(
    ("of_user", "of_trainer", "stops"),
    [
        ({"stop_token_ids": [7, 3]}, [2, 7], [2, 7, 3]),
        ({"ignore_eos": True}, [2], []),
        ({"ignore_eos": True, "stop_token_ids": [5]}, [2], [5]),
        ({}, [None, 2], [2]),  # a tokenizer without an EOS token
    ],
)
def test_an_answer_ends_at_the_tokens_of_trainer_and_user(monkeypatch, of_user, of_trainer, stops):
    sampling = parameters(monkeypatch, of_user, of_trainer=of_trainer)

    assert sampling["stop_token_ids"] == stops
    # By itself vLLM also stops at those of the model's files. It stops at stop tokens all the same.
    assert sampling["ignore_eos"] is True


def test_without_a_list_of_the_trainer_an_answer_ends_at_the_tokens_of_the_files(monkeypatch):
    sampling = parameters(monkeypatch, {"stop_token_ids": [7]}, of_trainer=None)

    assert sampling["stop_token_ids"] == [7]
    assert "ignore_eos" not in sampling


# Build ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(monkeypatch):
    """Starts an engine as TRL does, with `make_llm` in place of `vllm.LLM`."""

    def init_vllm(engine):
        engine.llm = vllm_generation.LLM(seed=0)
        if engine.enable_sleep_mode:
            engine.llm.sleep(level=2)

    monkeypatch.setattr(VLLMGeneration, "_init_vllm", init_vllm)
    monkeypatch.setattr(engine_settings, "changed_config", lambda *args: {})
    monkeypatch.setattr(rollout_engine.linear_layer, "use_settings_of", lambda llm: None)

    def run(engine, make_llm):
        monkeypatch.setattr(vllm_generation, "LLM", make_llm, raising=False)
        engine.model = SimpleNamespace(config=None)
        engine.trust_remote_code = False
        engine.quantization_config = None
        engine.engine_kwargs = {}
        engine._init_vllm()

    return run


def test_the_sync_check_sees_the_engine_before_trl_puts_it_to_sleep(start):
    """Level-2 sleep would leave nothing to look at."""
    order = []
    engine = generation(order, sleep=True)
    # With one process it would choose a port.
    engine.accelerator = SimpleNamespace(num_processes=2, process_index=1)
    engine.seed = 5

    def make_llm(**kwargs):
        order.append(kwargs["load_format"])
        return SimpleNamespace(sleep=lambda level: order.append(f"sleep {level}"))

    start(engine, make_llm)

    # Random weights first, by which the check sees whether a sync changes anything.
    assert order == ["dummy", "look", "sleep 2"]


@pytest.mark.parametrize(("ranks", "seeds"), [(1, [12, 13, 14, 15]), (2, [6, 6, 7, 7]), (4, [3, 3, 3, 3])])
def test_every_engine_of_every_run_has_a_seed_of_its_own(start, ranks, seeds):
    """TRL gives the engines of all runs the numbers 0, 1, ..., so that runs with two seeds would share draws."""
    taken = []
    engine = generation()
    engine.tensor_parallel_size = ranks
    # 3 x 4 engines, 3 x 2, 3 x 1: the ranks of one engine share a seed, and the next run begins where this one ends.
    engine.seed = 3

    for process in range(4):
        engine.accelerator = SimpleNamespace(num_processes=4, process_index=process)
        start(engine, lambda **kwargs: taken.append(kwargs["seed"]))

    assert taken == seeds


# Sync and check -------------------------------------------------------------------------------------------------


def test_a_sync_that_is_due_is_checked_in_it_and_its_time_counted():
    """Not in `generate`, which a `rollout_func` need not call."""
    order = []
    engine = generation(order, due=lambda number: number in (1, 3))
    engine.num_syncs = 0

    for _ in range(4):
        engine.sync_weights()

    assert order == ["send", "check 1", "send", "send", "check 3", "send"]
    assert engine.sync_seconds > 0
    assert engine.synced_bytes == 8


def test_a_sleeping_engine_gets_its_weights_and_cache_before_the_check(monkeypatch):
    """Level-2 sleep discards the weights."""
    monkeypatch.setattr(rollout_engine, "clear_device_cache", lambda: None)
    order = []

    generation(order, sleep=True).sync_weights()

    assert order == ["wake ['weights']", "send", "wake ['kv_cache']", "check 2"]


def test_a_failed_check_refuses_the_engine():
    def fail(*_):
        raise RuntimeError("stale")

    engine = generation()
    engine.sync_check.check = fail

    with pytest.raises(RuntimeError, match="stale"):
        engine.sync_weights()
    with pytest.raises(RuntimeError, match="A sync check of this engine failed earlier"):
        engine.sync_weights()


# Generate -------------------------------------------------------------------------------------------------------


def test_a_sync_inside_of_a_generation_counts_as_a_sync(monkeypatch):
    """TRL syncs there an engine whose sleep discarded the weights."""
    engine = generation()
    # Longer than all else here takes, also on a busy machine.
    engine._send = lambda weights: time.sleep(0.2)

    def sync_and_answer(self, prompts):
        self.sync_weights()
        return prompts, prompts

    monkeypatch.setattr(VLLMGeneration, "generate", sync_and_answer)
    engine.generate([[1]])

    assert engine.sync_seconds >= 0.2
    assert engine.rollout_seconds < 0.2

    def wait_and_answer(self, prompts):
        time.sleep(0.2)
        return prompts, prompts

    # Control: the same time outside of a sync.
    monkeypatch.setattr(VLLMGeneration, "generate", wait_and_answer)
    engine.generate([[1]])
    assert engine.rollout_seconds >= 0.2


def test_a_colocated_engine_never_answers_from_the_random_weights_of_its_start(monkeypatch):
    """A callback may ask it before training, and a resumed trainer before its next sync is due."""
    let_trl_return_the_prompts(monkeypatch)
    order = []
    engine = generation(order)
    engine.num_syncs = 0

    engine.generate([[1]])
    assert order == ["send", "check 1"]
    # Control: it has weights now.
    engine.generate([[1]])
    assert order == ["send", "check 1"]


def test_a_colocated_engine_gets_one_token_for_each_image(monkeypatch):
    """And its answer is that to the learner's prompt, or none."""
    engine = generation()
    engine.processing_class = SimpleNamespace(image_token_id=9)
    prompts = [[1, 9, 9, 2]]
    sent = []

    def answer(of_engine):
        def generate(self, prompts, images):
            sent.append(prompts)
            return of_engine, [[3]]

        monkeypatch.setattr(VLLMGeneration, "generate", generate)

    answer([[1, 9, 9, 2]])
    assert engine.generate(prompts, images=[["image"]]) == (prompts, [[3]])
    # Control: text stays as it is.
    engine.generate(prompts, images=None)
    assert sent == [[[1, 9, 2]], prompts]

    # It puts in three features where the learner has two.
    answer([[1, 9, 9, 9, 2]])
    with pytest.raises(RuntimeError, match="its images are put in differently"):
        engine.generate(prompts, images=[["image"]])


@pytest.mark.parametrize(
    ("prompts", "requests"),
    [
        # Two groups of two.
        ([[2], [2], [3], [3]], [([[2], [3]], 2)]),
        # An environment wrote another observation into the last one.
        ([[2], [2], [3], [4]], [([[2], [2], [3], [4]], 1)]),
        ([[2]], [([[2]], 2)]),
    ],
)
def test_a_server_answers_the_prompt_of_each_row(prompts, requests):
    """TRL sends a server the first prompt of each group, and takes its answers for those of the whole group."""
    sent = []

    class Server:
        """Answers each prompt with its own tokens."""

        def generate(self, prompts, n, **settings):
            sent.append((prompts, n))
            answers = [prompt for prompt in prompts for _ in range(n)]
            return {"prompt_ids": prompts, "completion_ids": answers, "logprobs": None}

        def raise_failure(self):
            pass

    engine = generation()
    engine.mode = "server"
    engine.vllm_client = Server()
    engine.accelerator = SimpleNamespace(
        num_processes=1, process_index=0, is_main_process=True, device="cpu", gather=lambda row: row
    )
    of_sampling = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length"]
    for name in (*of_sampling, "logprobs", "structured_outputs_regex", "generation_kwargs"):
        setattr(engine, name, None)

    _, answers, *_ = engine.generate(prompts=prompts, images=None, num_generations=2)

    assert answers == prompts
    assert sent == requests


def test_a_server_to_which_another_run_has_synced_during_the_check_is_named_as_the_reason():
    held = iter(["ours", "another run's"])

    class Server:
        """Another run syncs to it between the two times that it is asked."""

        def require_synced(self):
            version = next(held)
            if version != "ours":
                raise RuntimeError(f"must hold version 'ours', got {version}")

    def check(engine_logps, number):
        raise RuntimeError("the engine does not hold the synced weights")

    engine = generation()
    engine.mode = "server"
    engine.vllm_client = Server()
    engine.accelerator = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True, device="cpu")

    with pytest.raises(RuntimeError, match="must hold version 'ours', got another run's"):
        engine._check_sync(SimpleNamespace(check=check))

    # Control: of a server that nobody else uses, the check's own error.
    held = iter(["ours", "ours"])
    with pytest.raises(RuntimeError, match="does not hold the synced weights"):
        engine._check_sync(SimpleNamespace(check=check))


@pytest.mark.parametrize("is_there", [True, False])
def test_a_server_that_was_started_again_is_checked_after_its_first_sync(is_there):
    engine = generation()
    engine.mode = "server"
    engine.accelerator = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True, device="cpu")
    checks = []
    engine.vllm_client = SimpleNamespace(holds_last_sync=lambda: is_there, check_again=lambda: checks.append("again"))
    engine.sync_check = SimpleNamespace(asked=False)

    engine._compare_if_restarted()

    assert engine.sync_check.asked is not is_there
    assert checks == ([] if is_there else ["again"])


# Failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("no memory"), KeyboardInterrupt("no memory")])
def test_an_engine_in_which_something_failed_is_refused(monkeypatch, error):
    def fail(self, prompts):
        raise error

    engine = generation()
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
        # This process is well, and the other one is not.
        return torch.tensor([row[0], True])

    engine = generation()
    engine.accelerator = SimpleNamespace(num_processes=2, device="cpu", gather=gather)
    let_trl_return_the_prompts(monkeypatch)

    with pytest.raises(RuntimeError, match="The generation failed in process 1, which says why"):
        engine.generate([])
    with pytest.raises(RuntimeError, match="failed earlier"):
        engine.generate([])


def by_tools(trainer, prompts):
    return trainer._tool_call_loop(prompts)


def by_rollout_func(trainer, prompts):
    # Without the check of its result, which gathers once at its end.
    return trainer._roll_out(lambda prompts, trainer: trainer.vllm_generation.generate(prompts), prompts, trainer)


@pytest.mark.parametrize("answer", [by_tools, by_rollout_func])
def test_an_engine_in_a_loop_of_turns_waits_for_nobody(monkeypatch, answer):
    """The loop is as long as a process has turns, so another one would answer with its next collective."""
    gathered = []

    def gather(row):
        gathered.append(row)
        return row

    engine = generation()
    engine.accelerator = SimpleNamespace(num_processes=2, device="cpu", gather=gather)
    let_trl_return_the_prompts(monkeypatch)
    monkeypatch.setattr(GRPOTrainer, "_tool_call_loop", lambda self, prompts: self.vllm_generation.generate(prompts))
    monkeypatch.setattr(guards, "rollout_of_all", lambda rollout_func, *arguments: rollout_func(*arguments))
    monkeypatch.setattr(QaRLTrainer, "low_bit_store", None)
    trainer = object.__new__(QaRLTrainer)
    of_its_own = {"vllm_mode": "colocate", "vllm_enable_sleep_mode": False, "vllm_tensor_parallel_size": 1}
    trainer.args = SimpleNamespace(has_engine=True, **of_its_own)
    trainer.vllm_generation = engine
    trainer.model = torch.nn.Identity()

    assert answer(trainer, [[1]]) == ([[1]], [[1]])
    assert not gathered

    # Controls: it waits outside of the loop, and where processes share an engine.
    engine.generate([[1]])
    assert len(gathered) == 1
    trainer.args.vllm_tensor_parallel_size = 2
    engine._same_draws = nullcontext
    answer(trainer, [[1]])
    assert len(gathered) == 2

    # Without an engine there is nobody to wait for.
    trainer.args.has_engine = False
    trainer.rollout_func = None
    assert answer(trainer, [[1]]) == ([[1]], [[1]])
