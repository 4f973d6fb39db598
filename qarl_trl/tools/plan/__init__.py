"""`qarl-trl plan`: estimate the GPU memory and the seconds of a run before it starts."""
