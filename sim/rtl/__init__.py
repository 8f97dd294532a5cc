"""The Verilated hardware: how it is built, and the device that runs it."""
