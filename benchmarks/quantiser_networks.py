"""Six small networks in PyTorch, of the kinds that quantisers are used for, with random weights.

No part of celosia is imported here: the environments of quantisers have none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: nn.Module | None = None
) -> nn.Module:  # fmt: skip
    """Convolution, batch normalisation and an activation function."""
    layers = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)
    return nn.Sequential(*layers, *([] if act is None else [act]))


class ResidualBlock(nn.Module):  # type: ignore[misc]
    """ResNet's block (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(conv(inputs, outputs, 3, stride, act=nn.ReLU()), conv(outputs, outputs, 3))
        self.skip = nn.Identity() if inputs == outputs else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.skip(x))


class SqueezeExcite(nn.Module):  # type: ignore[misc]
    """Factors of channels (Hu et al. 2018), as MobileNetV3 has them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):  # type: ignore[misc]
    """MobileNetV3's block (Howard et al. 2019)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.skips = stride == 1 and inputs == outputs
        self.main = nn.Sequential(
            conv(inputs, wide, 1, act=nn.Hardswish()), conv(wide, wide, 3, stride, wide, nn.ReLU6()),
            SqueezeExcite(wide), conv(wide, outputs, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.main(x) if self.skips else self.main(x)


class C2f(nn.Module):  # type: ignore[misc]
    """YOLOv8's block: half of the channels through two bottlenecks, all parts concatenated."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.first, self.last = conv(inputs, outputs, 1, act=nn.SiLU()), conv(4 * half, outputs, 1, act=nn.SiLU())
        self.parts = nn.ModuleList(
            nn.Sequential(conv(half, half, 3, act=nn.SiLU()), conv(half, half, 3, act=nn.SiLU())) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for part in self.parts:
            parts.append(parts[-1] + part(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Detector(nn.Module):  # type: ignore[misc]
    """Two scales of C2f blocks, joined by a resize, with a box and a class for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fine = conv(3, 16, 3, 2, act=nn.SiLU()), C2f(16, 16)
        self.down, self.coarse = conv(16, 32, 3, 2, act=nn.SiLU()), C2f(32, 32)
        self.join, self.boxes, self.classes = C2f(48, 16), nn.Conv2d(16, 4, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(self.stem(x))
        coarse = self.coarse(self.down(fine))
        y = self.join(torch.cat([F.interpolate(coarse, scale_factor=2.0), fine], 1))
        pooled = F.max_pool2d(y, 5, 1, 2)
        return torch.cat([self.boxes(pooled), self.classes(y).sigmoid()], 1).flatten(2)


class Transformer(nn.Module):  # type: ignore[misc]
    """One block of an encoder: attention of four heads, and two products with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.project = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).reshape(1, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / 4.0).softmax(-1)
        x = x + self.project((weights @ v).transpose(1, 2).reshape(1, 16, 64))
        return self.head((x + self.mlp(x)).mean(1))


class UNet(nn.Module):  # type: ignore[misc]
    """Down and up again, with the finer features concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = conv(3, 8, 3, act=nn.ReLU()), conv(8, 16, 3, act=nn.LeakyReLU(0.1))
        self.up, self.leave = nn.ConvTranspose2d(16, 8, 2, 2), conv(16, 8, 3, act=nn.ReLU())
        self.mask = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.enter(x)
        up = self.up(self.down(F.max_pool2d(fine, 2)))
        return self.mask(self.leave(torch.cat([up, fine], 1)))


class Recurrent(nn.Module):  # type: ignore[misc]
    """An LSTM of two directions, a GRU, and a product behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 24, bidirectional=True, batch_first=True)
        self.gru, self.head = nn.GRU(48, 24, batch_first=True), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0])


def _resnet() -> nn.Module:
    blocks = nn.MaxPool2d(3, 2, 1), ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(conv(3, 16, 7, 2, act=nn.ReLU()), *blocks, nn.Flatten(), nn.Linear(32, 10))


def _mobilenet() -> nn.Module:
    blocks = Inverted(16, 16, 1), Inverted(16, 32, 2), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(conv(3, 16, 3, 2, act=nn.Hardswish()), *blocks, nn.Flatten(), nn.Linear(32, 10))


IMAGE = (1, 3, 32, 32)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (_resnet, IMAGE),
    "mobilenet": (_mobilenet, IMAGE),
    "detector": (Detector, IMAGE),
    "transformer": (Transformer, (1, 16, 64)),
    "unet": (UNet, IMAGE),
    "recurrent": (Recurrent, (1, 12, 16)),
}
"""The constructor of each network, and the shape of its input."""


def network(name: str) -> tuple[nn.Module, Tensor]:
    """A network in evaluation mode, and 8 samples [8, *shape] of its input."""
    make, shape = NETWORKS[name]
    torch.manual_seed(list(NETWORKS).index(name))
    model, samples = make(), torch.randn(8, *shape)
    with torch.no_grad():  # so that batch normalisation is no identity
        for sample in samples:
            model(sample)
    return model.eval(), samples


def export(model: nn.Module, example: Tensor, path: Path, opset: int = 17) -> None:
    """Write a module as ONNX with an input "x" and an output "y", by the exporter that has an LSTM stay one."""
    names = dict(input_names=["x"], output_names=["y"])
    torch.onnx.export(model, (example,), str(path), **names, opset_version=opset, dynamo=False)


def export_dynamo(model: nn.Module, example: Tensor, path: Path) -> None:
    """Write what PT2E returns as ONNX, with all its quantisations."""
    torch.onnx.export(
        model, (example,), str(path), input_names=["x"], output_names=["y"], dynamo=True, optimize=False,
        external_data=False, verbose=False,
    )  # fmt: skip
