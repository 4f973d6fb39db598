"""`qarl-trl plan`: estimate the GPU memory of a run before it starts."""
