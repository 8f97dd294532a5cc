"""PyTorch front end: modules as Programs, a quantiser for PT2E, and a backend for torch.compile. Needs
celosia[torch]."""

from importlib.util import find_spec

for _name in ("torch", "torchao", "onnxscript"):
    if find_spec(_name) is None:
        raise ImportError(f"to take models from PyTorch, {_name} is needed: pip install 'celosia[torch]'", name=_name)
