"""Boards (boards.py, or a user's TOML file), their FPGAs and their memory models. Standard library only."""
