"""Parts of a Runtime that only the host has: onnxruntime sessions, tools of devices, Programs for open shapes."""
