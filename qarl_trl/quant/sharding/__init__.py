"""Weights of which a process has only a part: FSDP2's shards, ZeRO-3's partitions."""
