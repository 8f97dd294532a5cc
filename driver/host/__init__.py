"""What a Runtime needs on the host alone: sessions of onnxruntime, tools of devices, Programs of open shapes."""
