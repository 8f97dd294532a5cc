"""PyTorch front end: modules as Programs, a quantiser for PT2E, and a backend for torch.compile. Needs celosia[torch].

- `quantizer.py`: decides which operators PT2E quantises, and how
- `products.py`: finds products of two activations, their operands, scalings and masks, for the quantiser
- `export.py`: `from_torch`, `to_onnx`: traces a module, writes it as ONNX, and checks that nothing is lost
- `decompose.py`: PyTorch's fused kernels as plain operators, before ONNX is written or products are annotated
- `fake_quantize.py`: fake quantisation as pairs of quantise and dequantise
- `backend.py`: `torch.compile(..., backend="celosia")`: decides when a graph is compiled again, and runs it
- `parts.py`: splits a graph around operators that torch.onnx does not know, for the backend
"""

from importlib.util import find_spec

for _name in ("torch", "torchao", "onnxscript"):
    if find_spec(_name) is None:
        raise ImportError(f"to take models from PyTorch, {_name} is needed: pip install 'celosia[torch]'", name=_name)
