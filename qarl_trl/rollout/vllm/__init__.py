"""Every place where rollouts reach into vLLM's private parts, each with its reason."""
