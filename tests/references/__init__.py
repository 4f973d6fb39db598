"""Slow and obvious versions of the package's arithmetic: Python numbers, one completion or one weight at a time.

Only tests import this package. Nothing here calls qarl_trl, compressed-tensors or a tensor operation that rounds.
"""

from .activations import (
    int4_float8_table,
    int4_int8_gemm,
    quantize_groups_float8,
    quantize_tokens_float8,
    quantize_tokens_int8,
    quantize_tokens_int8_asymmetric,
)
from .completions import (
    error_tokens,
    mismatch_weight,
    pass_at_k,
    positive_advantages,
    quantile,
    ratio_metrics,
    tbpo,
)
from .floats import bf16, cut_off_bf16, f32, float4_code, float8_byte, float8_value
from .layers import experts, logps_of_each_alone, muon, straight_through
from .weights import (
    BF16_EPS,
    FLOAT8_EPS,
    dequantize_rows,
    pack_int,
    pack_int4,
    pack_zero_points,
    quantize_float4,
    quantize_float8,
    quantize_float8_blocks,
    quantize_int,
    quantize_int4_asymmetric,
    unpack_int,
    unpack_int4,
)


__all__ = [
    "BF16_EPS",
    "FLOAT8_EPS",
    "bf16",
    "cut_off_bf16",
    "dequantize_rows",
    "error_tokens",
    "experts",
    "f32",
    "float4_code",
    "float8_byte",
    "float8_value",
    "int4_float8_table",
    "int4_int8_gemm",
    "logps_of_each_alone",
    "mismatch_weight",
    "muon",
    "pack_int",
    "pack_int4",
    "pack_zero_points",
    "pass_at_k",
    "positive_advantages",
    "quantile",
    "quantize_float4",
    "quantize_float8",
    "quantize_float8_blocks",
    "quantize_groups_float8",
    "quantize_int",
    "quantize_int4_asymmetric",
    "quantize_tokens_float8",
    "quantize_tokens_int8",
    "quantize_tokens_int8_asymmetric",
    "ratio_metrics",
    "straight_through",
    "tbpo",
    "unpack_int",
    "unpack_int4",
]
