"""Products with a low-bit weight, one class for each family of schemes, and the quantization of their inputs."""
