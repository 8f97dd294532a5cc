"""Quantise float models to 8-bit integers."""
