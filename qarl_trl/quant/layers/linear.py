"""`QuantLinear`: a linear layer whose forward multiplies by its low-bit weight (paper Sec. 3.1)."""

from __future__ import annotations

from torch import Tensor, nn

from ..sharding.gathers import whole_weights
from .layer import LowBitLayer


class QuantLinear(LowBitLayer, nn.Linear):
    """`nn.Linear` after [`qarl_trl.quant.apply_quantization`]; never constructed directly."""

    gatherable = ("weight",)

    def weight_names(self) -> tuple[str, ...]:
        return ("weight",)

    def forward(self, input: Tensor) -> Tensor:
        if not self.quantized_forward:
            with whole_weights(self):
                return super().forward(input)

        gemm = self.choose_gemm(input.device)
        return self.multiply(input, "weight", gemm, self.weight, bias=self.bias)
