"""Architectures of torchvision and timm with random weights, for `python -m benchmarks wild`.

    python -m benchmarks.wild_architectures PACKAGE NAME MODEL.onnx

exports one of them. The packages are installed without their dependencies into the cache, since torchvision's compiled
operators belong to another build of PyTorch than the CPU's; none of the networks needs these operators.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from celosia.cache import cache_folder

PACKAGES = ("torchvision==0.28.0", "timm==1.0.31", "huggingface-hub==2.4.0", "safetensors==0.8.0", "pyyaml==6.0.4")
SIDE = 224
"""Rows and columns of the images that all networks take."""
OPSET = 18


def _installed() -> Path:
    """Return the folder of PACKAGES in the cache; install them if they are not there. Raises RuntimeError."""
    folder = cache_folder() / "wild" / "packages"
    done = folder / "installed.txt"
    if not done.exists() or done.read_text(encoding="utf-8") != "\n".join(PACKAGES):
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-input", "--upgrade",
            "--disable-pip-version-check", "--target", str(folder), *PACKAGES,
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"pip: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")
        done.write_text("\n".join(PACKAGES), encoding="utf-8")
    return folder


def build(package: str, name: str) -> Any:
    """Return the network `name` of torchvision or timm in evaluation mode, with random weights of a fixed seed.

    Needs PyTorch (`make torch`). Raises RuntimeError where the packages cannot be installed.
    """
    import torch

    sys.path.append(str(_installed()))
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):  # torchvision gives them shapes on import, though its own library cannot be loaded
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.manual_seed(0)
    if package == "torchvision":
        import torchvision

        if name.startswith("lraspp"):
            return torchvision.models.segmentation.__dict__[name](weights=None, weights_backbone=None).eval()
        return torchvision.models.get_model(name, weights=None).eval()
    import timm

    return timm.create_model(name).eval()


def example() -> Any:
    """Return an image [1, 3, SIDE, SIDE] of normal noise, the same each time."""
    import torch

    return torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def export(package: str, name: str, path: Path) -> None:
    """Write the network as ONNX, with its weights in the file."""
    import torch

    network = build(package, name)
    torch.onnx.export(
        network, (example(),), path, input_names=["image"], opset_version=OPSET, dynamo=True, external_data=False,
        verbose=False,
    )  # fmt: skip


if __name__ == "__main__":
    export(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
