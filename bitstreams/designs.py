"""How much is built for an FPGA. Standard library only."""

from __future__ import annotations

from enum import StrEnum


class Design(StrEnum):
    """Everything, or the gemm unit with its scratchpads."""

    accelerator = "accelerator"
    gemm = "gemm"
