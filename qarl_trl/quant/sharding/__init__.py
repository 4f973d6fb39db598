"""Low-bit weights whose master weights are spread over processes; nobody else needs it.

`shards.py`: each process quantizes its own rows, and the bytes are those of the whole weight. `gathers.py`: FSDP2 then
moves quantized values in place of weights.
"""
