"""What a checkpoint scores on math problems, sampled by vLLM: `qarl-trl eval`."""
