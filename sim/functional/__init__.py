"""Functional simulator: the meaning of each instruction (reference.py), its fast form, and the device that runs it."""
