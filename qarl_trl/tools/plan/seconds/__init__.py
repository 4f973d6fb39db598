"""
How long a rollout batch takes.

1. `batch.py`: what a rollout batch is; `costs.py`: the constants; `weights.py`: how a parameter is multiplied.
2. `rollout.py`, `sync.py`, `update.py` and `optimizer.py`: a formula for each part. `parts.py` adds them up.
3. `measured.py`: the seconds that a real run logged, to which an estimate is fitted.
4. `arms.py`: the same recipe in bfloat16 and in low bits; `table.py`: these side by side.
"""
