"""How near a model is to onnxruntime, and to its labels."""
