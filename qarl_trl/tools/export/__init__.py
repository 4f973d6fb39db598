"""`qarl-trl export`: write a low-bit checkpoint for vLLM."""
