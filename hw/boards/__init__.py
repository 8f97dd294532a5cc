"""Boards that the accelerator runs on: their FPGAs, processors, lights and memories. Standard library only."""
