"""Training checkpoints: in their place only when complete, and resumed bit for bit (dev/reliability.md)."""
