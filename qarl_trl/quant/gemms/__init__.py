"""Products with a low-bit weight that round as the engine's do.

`gemm.py` has one class for each family of schemes, `activations.py` quantizes their inputs, and `grouped.py` has the
product of all experts at once.
"""
