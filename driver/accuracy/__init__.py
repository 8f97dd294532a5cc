"""Accuracy of a model: differences from onnxruntime, and from its labels."""
