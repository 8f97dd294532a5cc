"""Designs to build for an FPGA: a part, or the whole accelerator. Standard library only."""

from __future__ import annotations

from enum import StrEnum


class Design(StrEnum):
    """Design to build: everything, or the gemm unit with its scratchpads."""

    accelerator = "accelerator"
    gemm = "gemm"
