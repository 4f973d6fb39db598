"""Low-bit layers: modules of a model that ask its store for their weight, multiply by it, and keep their parameters.

`layer.py` is what they have in common, `matmul.py` the product with its straight-through gradient. The kinds of them:
`linear.py`, `lora.py` (the merged weight is quantized), `frozen.py` (an adapter beside a base without master weights)
and `experts.py`.
"""
