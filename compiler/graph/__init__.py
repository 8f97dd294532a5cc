"""Passes over the ONNX graph, in memory as onnx-ir."""
