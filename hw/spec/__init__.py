"""The contract of hardware and software: Config, instruction set, registers, scratchpads. Standard library only."""
