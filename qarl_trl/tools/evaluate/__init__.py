"""`qarl-trl eval`: score a checkpoint on math problems, with completions from vLLM."""
