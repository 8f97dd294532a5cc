"""Proofs about the hardware: properties as Amaranth, decided by SymbiYosys and Yices. docs/proofs.md tells how."""
