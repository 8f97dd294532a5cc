"""The element types that compiled CPU kernels have."""

from __future__ import annotations

from celosia.compiler.program import dtypes

TYPES = (
    "float16", "float32", "float64", "bool", "bfloat16",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)  # fmt: skip
"""Element types that kernels load and store. They compute in all but bfloat16, which ops.build converts to float32."""
ONNX_TYPES = {code: name for code, name in dtypes.ONNX_TYPES.items() if name in TYPES}
"""onnx.TensorProto.DataType -> element type, of the TYPES only."""
