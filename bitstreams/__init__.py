"""Bitstreams: projects for Vivado and ECP5, and estimates of area, timing and power."""
