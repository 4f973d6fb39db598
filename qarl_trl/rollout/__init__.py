"""Low-bit rollouts: an engine that samples with the learner's low-bit tensors.

- `engine` is the engine of a run: built, synced, checked, asked for completions. Start here.
- `engine_settings`, `scheme_support`, `cpu_support`: what it is told at its start, and what it can run.
- `adapter_folder`: where an adapter is written.
- `sync_check/`: does the engine hold what was synced?
- `server/`: an engine in another process.
- `vllm/`: all that reaches into vLLM's private parts.
- `engine_gemm`: the engine's kernels in the learner (`quant_kernel="engine"`).
"""
