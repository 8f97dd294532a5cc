"""Element types of kernels."""

TYPES = (
    "float16", "float32", "float64", "bool", "bfloat16",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)  # fmt: skip
"""bfloat16 is only stored, loaded and converted; see ops.build."""
