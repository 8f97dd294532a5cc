"""Celosia: compile int8 ONNX models for a tensor accelerator described in Python, and run them on its RTL."""
