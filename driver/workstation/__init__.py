"""Parts of the driver that boards do not need, since they need onnx, onnxruntime or the compiler.

specialise   which Program runs a model whose inputs have open sizes: one for each combination of shapes; how many are
             kept
oracle       how onnxruntime computes a model, for comparison: in integers, and every tensor inside it; the error where
             a library is not installed
tools        whether the tools that a device needs are installed, before a model is compiled for it
"""
