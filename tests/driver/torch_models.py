"""Six small networks in PyTorch, of kinds that torchvision has, and helpers to export them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import onnx
import pytest
from driver_models import UNBLOCKED

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make torch` installs it")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import celosia  # noqa: E402
from celosia.compiler.program import Program  # noqa: E402
from celosia.driver.torch import export  # noqa: E402
from celosia.hw.spec.config import Config  # noqa: E402


def block(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: nn.Module | None = None):
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), *([] if act is None else [act]))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(block(inputs, outputs, 3, stride, act=nn.ReLU()), block(outputs, outputs, 3))
        self.skip = nn.Identity() if inputs == outputs else block(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.skip(x))


def residual() -> nn.Module:
    return nn.Sequential(
        block(3, 16, 7, 2, act=nn.ReLU()), nn.MaxPool2d(3, 2, 1), Residual(16, 16, 1), Residual(16, 32, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


class Inverted(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.skips = stride == 1 and inputs == outputs
        self.main = nn.Sequential(
            block(inputs, wide, 1, act=nn.ReLU6()), block(wide, wide, 3, stride, wide, nn.Hardswish()),
            block(wide, outputs, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.main(x) if self.skips else self.main(x)


def depthwise() -> nn.Module:
    return nn.Sequential(
        block(3, 16, 3, 2, act=nn.Hardswish()), Inverted(16, 16, 1), Inverted(16, 32, 2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


class Attention(nn.Module):
    """A vision transformer of one block: 16 patches, 4 heads of 8 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 32, 4, 4), nn.LayerNorm(32)
        self.qkv, self.project = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x).flatten(2).transpose(1, 2)
        batch, tokens, width = t.shape
        q, k, v = self.qkv(self.norm(t)).reshape(batch, tokens, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        t = t + self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width))
        t = t + self.mlp(t)
        return self.head(t.mean(1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Detector(nn.Module):
    """A detector like FCOS, with two resolutions and a feature pyramid between them.

    It returns corners of boxes, computed from distances, and scores of three classes, for the 8×8 and 4×4 places of a
    32×32 image.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fine, self.coarse = (block(n, 2 * n if n > 3 else 16, 3, 2, act=nn.SiLU()) for n in (3, 16, 32))
        self.lateral, self.merge = nn.Conv2d(64, 32, 1), block(64, 32, 3, act=nn.SiLU())
        self.boxes = nn.ModuleList([nn.Conv2d(32, 4, 1), nn.Conv2d(64, 4, 1)])
        self.classes = nn.ModuleList([nn.Conv2d(32, 3, 1), nn.Conv2d(64, 3, 1)])
        places = [torch.cartesian_prod(torch.arange(n), torch.arange(n)).T * (32 / n) for n in (8, 4)]
        self.register_buffer("places", torch.cat(places, 1))
        self.register_buffer("strides", torch.cat([torch.full((n * n,), 32.0 / n) for n in (8, 4)]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.fine(self.stem(x))
        coarse = self.coarse(fine)
        fine = self.merge(torch.cat([fine, F.interpolate(self.lateral(coarse), scale_factor=2.0)], 1))
        boxes, scores = (
            torch.cat([head(feature).flatten(2) for head, feature in zip(heads, (fine, coarse))], 2)
            for heads in (self.boxes, self.classes)
        )
        near, far = (F.relu(boxes) * self.strides).split(2, 1)
        return torch.cat([self.places - near, self.places + far], 1), scores.sigmoid()


class UNet(nn.Module):
    """One step down and up again; the features from before the step are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = block(3, 8, 3, act=nn.ReLU()), block(8, 16, 3, act=nn.ReLU())
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        return self.last(torch.cat([self.up(self.deep(F.max_pool2d(fine, 2))), fine], 1))


class Joined(nn.Module):
    """x + f(x), x * f(x), or the concatenation of x and f(x)."""

    def __init__(self, how: str, inner: nn.Module) -> None:
        super().__init__()
        self.how, self.inner = how, inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return torch.cat([x, y], 1) if self.how == "cat" else x + y if self.how == "add" else x * y


ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU, nn.Sigmoid, nn.Hardsigmoid, nn.LeakyReLU, nn.Identity)


def random_network(seed: int) -> tuple[nn.Module, Tensor]:
    """Return a random network of layers that the accelerator has, and an input."""
    torch.manual_seed(seed)
    choose = Random(seed)
    layers: list[nn.Module] = []
    channels, size = 3, choose.choice((8, 12))
    for _ in range(choose.randint(2, 5)):
        how, act = choose.choice(("conv", "depthwise", "pool", "up", "add", "mul", "cat")), choose.choice(ACTIVATIONS)
        if how == "conv":
            outputs = choose.choice((4, 8, 12))
            layers.append(block(channels, outputs, choose.choice((1, 3, 5)), choose.choice((1, 2)), act=act()))
            channels = outputs
        elif how == "depthwise":
            layers.append(block(channels, channels, 3, groups=channels, act=act()))
        elif how in ("pool", "up"):
            layers.append(nn.MaxPool2d(3, 1, 1) if how == "pool" else nn.Upsample(scale_factor=2))
        else:
            layers.append(Joined(how, block(channels, channels, 3, act=act())))
            channels *= 2 if how == "cat" else 1
    layers += [nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(channels, 5)]
    return nn.Sequential(*layers).eval(), torch.randn(choose.choice((1, 2)), 3, size, size)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (conv, (2, 3, 16, 16)),
    "residual": (residual, (1, 3, 16, 16)),
    "depthwise": (depthwise, (1, 3, 16, 16)),
    "attention": (Attention, (1, 3, 16, 16)),
    "lstm": (Lstm, (2, 7, 16)),
    "detector": (Detector, (1, 3, 32, 32)),
}
"""The function that makes a network, and the shape of its input, by name."""


def network(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """Return a network with random weights and statistics, in evaluation mode, and an input."""
    make, shape = NETWORKS[name]
    torch.manual_seed(seed)
    net = make().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
    return net, torch.randn(shape)


def exported(
    module: nn.Module, x: Tensor, config: str | Config = UNBLOCKED, **options: Any
) -> tuple[onnx.ModelProto, Program]:
    """Return the models that `to_onnx` and `from_torch` make of a module, from one export by torch.

    An export takes torch a second or more.
    """
    original, protos = export._export_onnx, []

    def recording(*args: Any) -> onnx.ModelProto:
        protos.append(original(*args))
        return protos[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_export_onnx", recording)
        program = celosia.from_torch(module, x, config, **options)
    (proto,) = protos
    return proto, program
