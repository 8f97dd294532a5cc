"""Kernels and operators on the host: what reads and runs a Program imports numpy and the standard library only."""
