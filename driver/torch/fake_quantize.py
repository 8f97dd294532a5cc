"""Convert fake quantisation (rounding floats to multiples of a scale) to pairs of quantise and dequantise.

Calls of `torch.fake_quantize_*` become such pairs. A FakeQuantize submodule of `torch.ao.quantization` is one such call
while its observer is off; with an observer that is on, its scale is no constant.
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
"""The way out in error messages."""


class UnsettledError(ValueError):
    """Fake quantisation that cannot become quantise and dequantise. The message says what to do."""


def _fake_quantise_within(low: int, high: int, quantise_between: Callable[[int, int], Tensor]) -> Tensor:
    """Fake-quantise to the integers low..high, a part of the range of int8 or uint8, since ONNX has only full ranges.

    quantise_between: clamps its input to low..high, then quantises with the limits that it is called with, those of
    int8 or uint8. Returns NotImplemented, by which PyTorch keeps the operator, if low..high is a full range already.
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
    """Decompose torch.fake_quantize_per_tensor_affine. scale, zero_point: numbers, or tensors of one element."""

    def quantise_between(low: int, high: int) -> Tensor:
        """Clamp x to the narrow range, and fake-quantise it to low..high."""
        clamped = torch.clamp(x, (quant_min - zero_point) * scale, (quant_max - zero_point) * scale)
        return torch.fake_quantize_per_tensor_affine(clamped, scale, zero_point, low, high)

    return _fake_quantise_within(quant_min, quant_max, quantise_between)


def per_channel(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int) -> Tensor:
    """Decompose torch.fake_quantize_per_channel_affine. scale, zero_point: one for each element along `axis`."""

    def quantise_between(low: int, high: int) -> Tensor:
        """Clamp x to the narrow range, and fake-quantise it to low..high."""
        broadcast_shape = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]
        ends = ((end - zero_point).mul(scale).reshape(broadcast_shape) for end in (quant_min, quant_max))
        return torch.fake_quantize_per_channel_affine(torch.clamp(x, *ends), scale, zero_point, axis, low, high)

    return _fake_quantise_within(quant_min, quant_max, quantise_between)


PAIRS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.fake_quantize_per_tensor_affine.default: per_tensor,
    aten.fake_quantize_per_tensor_affine.tensor_qparams: per_tensor,
    aten.fake_quantize_per_channel_affine.default: per_channel,
}
"""Decompositions of PyTorch's fake quantisations, whose range torch.onnx ignores, by operator."""


class _ConstantFakeQuantize(nn.Module):  # type: ignore[misc]
    """Fake quantisation with constant scales: what a FakeQuantize computes while its observer is off."""

    def __init__(self, fake: FakeQuantize) -> None:
        super().__init__()
        self.low, self.high, self.axis = int(fake.quant_min), int(fake.quant_max), int(fake.ch_axis)
        self.by_channel = bool(fake.is_per_channel)
        self.scale = nn.Buffer(fake.scale.detach().clone())
        self.zero_point = nn.Buffer(fake.zero_point.detach().to(torch.int32))
        self.scalar_scale, self.scalar_zero_point = float(self.scale.flatten()[0]), int(self.zero_point.flatten()[0])

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantise x, by channel or as a whole."""
        if self.by_channel:
            channel_parameters = self.scale, self.zero_point, self.axis
            return torch.fake_quantize_per_channel_affine(x, *channel_parameters, self.low, self.high)
        return torch.fake_quantize_per_tensor_affine(x, self.scalar_scale, self.scalar_zero_point, self.low, self.high)


@contextlib.contextmanager
def settle_observers(module: nn.Module) -> Iterator[None]:
    """Replace, inside the context, the FakeQuantize submodules of `module` by modules with constant scales.

    UnsettledError for observers, and for submodules that still observe.
    """
    submodules = {
        path: submodule
        for path, submodule in module.named_modules()
        if isinstance(submodule, (FakeQuantizeBase, ObserverBase))
    }
    nested_observers = {
        id(observer)
        for submodule in submodules.values() if isinstance(submodule, FakeQuantizeBase)
        for observer in submodule.modules() if observer is not submodule
    }  # fmt: skip
    submodules = {path: submodule for path, submodule in submodules.items() if id(submodule) not in nested_observers}
    for path, submodule in submodules.items():
        if reason := _explain_unsettled(submodule):
            raise UnsettledError(f"{path or 'the module'} is a {type(submodule).__name__} {reason}, or {ADVICE}")
    try:
        for path, submodule in submodules.items():
            module.set_submodule(
                path, _ConstantFakeQuantize(submodule) if bool(submodule.fake_quant_enabled[0]) else nn.Identity()
            )
        yield
    finally:
        for path, submodule in submodules.items():
            module.set_submodule(path, submodule)


def _explain_unsettled(submodule: nn.Module) -> str:
    """Return why a submodule's scale is no constant, as the end of a sentence; "" where it is one."""
    if isinstance(submodule, ObserverBase):
        return "that changes with what it sees; remove it"
    if not isinstance(submodule, FakeQuantize) or submodule.scale.dim() > 1 or submodule.scale.dtype != torch.float32:
        return "that rounds in its own way; take torch.ao.quantization's, with float32 scales of a tensor or channels"
    if bool(submodule.observer_enabled[0]):
        return "whose observer changes its scale; call apply(torch.ao.quantization.disable_observer)"
    return ""
