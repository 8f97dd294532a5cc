"""The meaning of each instruction, and the device that executes it."""
