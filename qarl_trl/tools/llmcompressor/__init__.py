"""What goes through llm-compressor, or starts from its checkpoints."""
