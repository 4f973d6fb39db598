"""The Triton kernel of `cuda_kernels.decode_int4`, a module of its own: importing it needs Triton."""

import triton
import triton.language as tl


# Triton reads the annotations when it compiles, and knows none but its own.
@triton.jit
def decode_int4_kernel(  # type: ignore[no-untyped-def]
    words,  # int32, of the whole matrix
    scale,  # bfloat16, one for each group
    zero_point,  # int8, one for each group; unused without `has_zero_point`
    matrix,  # the result
    number,  # of words
    words_of_row,
    words_of_group,
    groups_of_row,
    has_zero_point: tl.constexpr,
    block: tl.constexpr,
):
    """Each program takes `block` words and writes the eight values of each."""
    # 64 bits: `word * 8` below passes 2**31 for a large matrix.
    word = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_word = word < number
    packed = tl.load(words + word, mask=is_word, other=0)

    # Scales lie row by row, `(out, groups)`, so the flat number of a word tells its group.
    row = word // words_of_row
    group = row * groups_of_row + (word - row * words_of_row) // words_of_group
    group_scale = tl.load(scale + group, mask=is_word, other=0.0).to(tl.float32)

    position = tl.arange(0, 8)
    # A shift of int32 carries the sign; the mask drops it. Stored is the value plus 8.
    values = ((packed[:, None] >> (4 * position)[None, :]) & 0xF) - 8
    if has_zero_point:
        group_zero_point = tl.load(zero_point + group, mask=is_word, other=0).to(tl.int32)
        values -= group_zero_point[:, None]

    # Exact in float32, then rounded once, to bfloat16. Float32 matrices hold the same numbers.
    product = (values.to(tl.float32) * group_scale[:, None]).to(tl.bfloat16)
    place = word[:, None] * 8 + position[None, :]
    tl.store(matrix + place, product.to(matrix.dtype.element_ty), mask=is_word[:, None])
