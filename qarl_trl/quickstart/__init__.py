"""The quickstart: a small model learns, by RL on 4-bit rollouts, to write its working out."""

import logging


# vLLM sets its level when an engine starts, after its first warnings (no Triton on a CPU); also in the engines' processes.
logging.getLogger("vllm").setLevel(logging.ERROR)
