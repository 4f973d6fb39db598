"""Training checkpoints: complete or absent, and resumed bit for bit (dev/architecture.md)."""
