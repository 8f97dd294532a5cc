"""Parts that several units of the hardware use: AXI signatures, registers, layouts of instructions."""
