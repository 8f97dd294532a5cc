"""The compiler: ONNX in, Program out."""
