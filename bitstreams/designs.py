"""Designs that Celosia can build for an FPGA without a processor. Standard library only."""

from __future__ import annotations

from enum import StrEnum


class Design(StrEnum):
    """Part of the accelerator that is built: all of it, or the gemm unit with its scratchpads."""

    accelerator = "accelerator"
    gemm = "gemm"
