"""What exists only so that a learner beside vLLM's CPU engine computes the same bits as that engine."""
