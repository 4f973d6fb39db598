"""Every place where a rollout reaches into vLLM's private parts.

vLLM has no public interface for most of what low-bit rollouts need. A module here says what vLLM does by itself, what
a run needs instead, and in which of vLLM's files (of version 0.31) that is decided. A name that a version lacks
raises, unless the module says what stands for it.

- Start: `start`, `attention_scales`.
- Weight sync: `reloading` runs vLLM's own reload, which has gaps: `reload_biases`, `reload_experts` (GPUs) and
  `reload_cpu` fill them, `loaded_elements` counts what arrived. `adapters` syncs the adapter of a frozen base.
- Sampling: `sampling`, `flat_logprobs`.
- The learner: `linear_layer` is the engine's layer with the learner's weight.

Two more places are elsewhere: `server/worker.py` and `server/worker_calls.py` in vLLM's server, and
`cpu_exact/kernels.py`, the arithmetic of its CPU kernels.
"""
