"""Boards, their FPGAs and their memories. Standard library only."""
