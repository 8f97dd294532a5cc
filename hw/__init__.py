"""The accelerator: its Config, instruction set and registers (standard library only) and its hardware (Amaranth)."""
