"""`qarl-trl doctor`: what can be known of a run before it costs anything, section by section."""

import logging


# vLLM sets its level when an engine starts, after its first warnings (no Triton on a CPU); also in the engines' processes.
logging.getLogger("vllm").setLevel(logging.ERROR)
