"""Proofs about the hardware: properties as Amaranth, decided by SymbiYosys and Yices. See docs/proofs.md."""
