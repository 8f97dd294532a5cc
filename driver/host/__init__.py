"""Parts of a Runtime that only the host needs: onnxruntime sessions, tools of devices, Programs for open shapes."""
