"""`qarl_trl.rollout.engine` without an engine: when a publish is checked. The rest runs on a real one, in tests/slow."""

from types import SimpleNamespace

from qarl_trl.rollout.engine import LowBitVLLMGeneration, Publish


def generation(order, due=lambda number: True, sleep=False):
    """A `LowBitVLLMGeneration` after one publish, whose engine and canary write down what they are asked."""
    engine = object.__new__(LowBitVLLMGeneration)
    engine.enable_sleep_mode = engine._llm_weights_sleeping = sleep
    engine.publishes, engine.num_publishes, engine._checked = [Publish(1.0, 8, 1)], 1, 0
    engine.llm = SimpleNamespace(wake_up=lambda tags: order.append(f"wake {tags}"))

    def sync_weights():
        order.append("publish")
        engine.num_publishes += 1
        engine._llm_weights_sleeping = False

    engine.sync_weights = sync_weights
    canary = SimpleNamespace(due=due, check=lambda llm, number: order.append(f"check {number}"))
    return engine, canary


def test_a_publish_is_checked_once_and_its_time_counted():
    order = []
    engine, canary = generation(order)
    engine._check_publish(canary)
    engine._check_publish(canary)
    assert order == ["check 1"]
    assert engine.publishes[0].seconds > 1.0
    engine.num_publishes = 2
    engine.reset_clock()
    engine._check_publish(canary)
    assert order == ["check 1", "check 2"]


def test_a_publish_that_is_not_due_is_left_alone():
    order = []
    engine, canary = generation(order, due=lambda number: False)
    engine._check_publish(canary)
    assert order == []


def test_a_first_publish_that_was_replaced_before_sampling_is_not_lost():
    order = []
    engine, canary = generation(order, due=lambda number: number == 1)
    engine.num_publishes = 2
    engine._check_publish(canary)
    engine._check_publish(canary)
    assert order == ["check 2"]


def test_a_sleeping_engine_gets_its_weights_and_cache_before_the_check():
    """Level-2 sleep discards the weights, and TRL publishes again only inside `generate`."""
    order = []
    engine, canary = generation(order, sleep=True)
    engine._check_publish(canary)
    assert order == ["publish", "wake ['kv_cache']", "check 2"]
