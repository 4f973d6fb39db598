"""The Triton kernel of `cuda_kernels.decode_int4`, a module of its own: importing it needs Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def decode_int4_kernel(
    words: Any,  # int32, of the whole matrix
    scale: Any,  # bfloat16, one for each group
    zero_point: Any,  # int8, one for each group; unused without `has_zero_point`
    matrix: Any,  # the result
    number: int,  # of words
    words_of_row: int,
    words_of_group: int,
    groups_of_row: int,
    has_zero_point: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Each program takes `block` words and writes the eight values of each."""
    word = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_word = word < number
    packed = tl.load(words + word, mask=is_word, other=0)

    row = word // words_of_row
    group = row * groups_of_row + (word - row * words_of_row) // words_of_group
    group_scale = tl.load(scale + group, mask=is_word, other=0.0).to(tl.float32)

    position = tl.arange(0, 8)
    values = ((packed[:, None] >> (4 * position)[None, :]) & 0xF) - 8
    if has_zero_point:
        group_zero_point = tl.load(zero_point + group, mask=is_word, other=0).to(tl.int32)
        values -= group_zero_point[:, None]

    # Exact in float32, then rounded once, to bfloat16. Float32 matrices hold the same numbers.
    product = (values.to(tl.float32) * group_scale[:, None]).to(tl.bfloat16)
    place = word[:, None] * 8 + position[None, :]
    tl.store(matrix + place, product.to(matrix.dtype.element_ty), mask=is_word[:, None])
