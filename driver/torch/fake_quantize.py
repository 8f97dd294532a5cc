"""Fake quantisation (floats rounded to a grid) as pairs of quantise and dequantise.

`torch.fake_quantize_*` in a module becomes such pairs. A FakeQuantize submodule of `torch.ao.quantization` is one such
call while its observer is off; with an observer that is on, the grid is no constant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, FakeQuantizeBase, ObserverBase

aten = torch.ops.aten
ADVICE = (
    "quantise with torchao's PT2E: prepare_pt2e or prepare_qat_pt2e with celosia.driver.torch.quantizer's "
    "CelosiaQuantizer, then convert_pt2e"
)


class UnsettledError(ValueError):
    """Fake quantisation that is no pair of quantise and dequantise; one sentence with the way out."""


def _fake_quantise_within(low: int, high: int, quantise_between: Callable[[int, int], Tensor]) -> Tensor:
    """Fake-quantise to low..high by quantise_between(limits of int8 or uint8), which clamps its input to low..high.

    Returns NotImplemented, which leaves the operator as it is, where low..high is the whole range of int8 or uint8.
    UnsettledError where 8 bits are too few.
    """
    for kind in (torch.int8, torch.uint8):
        info = torch.iinfo(kind)
        if (low, high) == (info.min, info.max):
            return NotImplemented
        if info.min <= low and high <= info.max:
            return quantise_between(info.min, info.max)
    raise UnsettledError(f"fake quantisation to {low}..{high} needs more than 8 bits; {ADVICE}")


def per_tensor(x: Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Tensor:
    """Replace torch.fake_quantize_per_tensor_affine. scale, zero_point: numbers, or tensors of one element."""

    def quantise_between(low: int, high: int) -> Tensor:
        clamped = torch.clamp(x, (quant_min - zero_point) * scale, (quant_max - zero_point) * scale)
        return torch.fake_quantize_per_tensor_affine(clamped, scale, zero_point, low, high)

    return _fake_quantise_within(quant_min, quant_max, quantise_between)


def per_channel(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int) -> Tensor:
    """Replace torch.fake_quantize_per_channel_affine. scale, zero_point: of each element along `axis`."""

    def quantise_between(low: int, high: int) -> Tensor:
        broadcast_shape = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]
        ends = ((end - zero_point).mul(scale).reshape(broadcast_shape) for end in (quant_min, quant_max))
        return torch.fake_quantize_per_channel_affine(torch.clamp(x, *ends), scale, zero_point, axis, low, high)

    return _fake_quantise_within(quant_min, quant_max, quantise_between)


PAIRS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.fake_quantize_per_tensor_affine.default: per_tensor,
    aten.fake_quantize_per_tensor_affine.tensor_qparams: per_tensor,
    aten.fake_quantize_per_channel_affine.default: per_channel,
}
"""Replacement of each operator of PyTorch whose range torch.onnx does not know."""


class _Settled(nn.Module):  # type: ignore[misc]
    """Fake quantisation with constant scales, as a FakeQuantize computes it while its observer is off."""

    def __init__(self, fake: FakeQuantize) -> None:
        super().__init__()
        self.low, self.high, self.axis = int(fake.quant_min), int(fake.quant_max), int(fake.ch_axis)
        self.by_channel = bool(fake.is_per_channel)
        self.scale = nn.Buffer(fake.scale.detach().clone())
        self.zero_point = nn.Buffer(fake.zero_point.detach().to(torch.int32))
        self.number, self.zero = float(self.scale.flatten()[0]), int(self.zero_point.flatten()[0])

    def forward(self, x: Tensor) -> Tensor:
        if self.by_channel:
            grid = self.scale, self.zero_point, self.axis
            return torch.fake_quantize_per_channel_affine(x, *grid, self.low, self.high)
        return torch.fake_quantize_per_tensor_affine(x, self.number, self.zero, self.low, self.high)


@contextlib.contextmanager
def settle_observers(module: nn.Module) -> Iterator[None]:
    """Fix, inside the context, the FakeQuantize submodules of `module` whose observers are off.

    UnsettledError for observers, and for submodules that still observe.
    """
    parts = {path: part for path, part in module.named_modules() if isinstance(part, (FakeQuantizeBase, ObserverBase))}
    inside = {
        id(observer) for part in parts.values() if isinstance(part, FakeQuantizeBase) for observer in part.modules()
        if observer is not part
    }  # fmt: skip
    parts = {path: part for path, part in parts.items() if id(part) not in inside}
    for path, part in parts.items():
        if reason := _why_unsettled(part):
            raise UnsettledError(f"{path or 'the module'} is a {type(part).__name__} {reason}, or {ADVICE}")
    try:
        for path, part in parts.items():
            module.set_submodule(path, _Settled(part) if bool(part.fake_quant_enabled[0]) else nn.Identity())
        yield
    finally:
        for path, part in parts.items():
            module.set_submodule(path, part)


def _why_unsettled(part: nn.Module) -> str:
    """Explain why a submodule cannot be fixed; "" where it can."""
    if isinstance(part, ObserverBase):
        return "that changes with what it sees; remove it"
    if not isinstance(part, FakeQuantize) or part.scale.dim() > 1 or part.scale.dtype != torch.float32:
        return "that rounds in its own way; take torch.ao.quantization's, with float32 scales of a tensor or channels"
    if bool(part.observer_enabled[0]):
        return "whose observer changes its scale; call apply(torch.ao.quantization.disable_observer)"
    return ""
