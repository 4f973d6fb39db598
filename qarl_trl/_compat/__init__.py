"""
Versions, and every private part of TRL, transformers, accelerate and torch that we use or replace.

Each module is about one subject, and says of each part why, where it is upstream, and what happens when it changes:
an error, never a fallback. A part is replaced while a `with` block runs, wherever that is enough. `rollout/vllm/`
does the same for vLLM, and `cpu_exact/kernels.py` for the kernels of its CPU engine.

| module | upstream | what |
| --- | --- | --- |
| `versions` | all | refuses versions that were not tested |
| `arguments` | transformers | fields of the settings that may be JSON |
| `construction` | TRL, transformers | engine, models and reference that a trainer's constructor makes |
| `rollout_batch` | TRL | order of rows, log-probs and rewards of a rollout batch |
| `training_loop` | transformers, accelerate | callbacks, and when gradients are synchronized |
| `sharding` | accelerate, DeepSpeed | FSDP2 and ZeRO-3: dtypes, and what is gathered |
| `noise` | vLLM | messages that mislead |
| `resuming` | transformers, torch | loads training checkpoints |

The windows of versions in `pyproject.toml` end where nothing was tested.
"""
