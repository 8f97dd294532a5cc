"""Layers as they were published, with random weights, of which a part is rewritten and the rest corrected: what the
superoptimiser's partly equivalent rules are measured on.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from benchmarks.branches import Branchy


def _dilated(m: Branchy, x: str, inputs: int, outputs: int, rate: int) -> str:
    return m.conv(x, inputs, outputs, 3, pad=rate, dilation=rate)


def deeplab_head() -> onnx.ModelProto:
    """DeepLabv3's pyramid on 33 x 33: 3x3 convolutions with dilations of 6, 12 and 18 and a 1x1 convolution, to 256
    channels each, put together; 320 channels, as MobileNetV2 has them."""
    m = Branchy((1, 64, 33, 33))
    x = m.conv("x", 64, 320)
    branches = (m.conv(x, 320, 256), *(_dilated(m, x, 320, 256, rate) for rate in (6, 12, 18)))
    return m.model(m.conv(m.op("Concat", *branches, axis=1), 1024, 256))


def dilated_stage() -> onnx.ModelProto:
    """Two blocks of the last stage of a ResNet-18 whose strides became dilations of 4, on 28 x 28."""
    m = Branchy((1, 256, 28, 28))
    x = m.conv("x", 256, 512)
    for _ in range(2):
        y = m.conv(_dilated(m, x, 512, 512, 4), 512, 512, 3, pad=4, dilation=4, relu=False)
        x = m.op("Relu", m.op("Add", x, y))
    return m.model(x)


def denoiser() -> onnx.ModelProto:
    """The last three convolutions of a DnCNN, on 50 x 50: 64 channels, and one."""
    m = Branchy((1, 64, 50, 50))
    x = m.conv(m.conv("x", 64, 64, 3), 64, 64, 3)
    return m.model(m.conv(x, 64, 1, 3, relu=False))


def srcnn() -> onnx.ModelProto:
    """SRCNN 9-1-5 behind its first layer, on 48 x 48: 64, 32 channels and one."""
    m = Branchy((1, 64, 48, 48))
    return m.model(m.conv(m.conv("x", 64, 32), 32, 1, 5, relu=False))


def retina_head() -> onnx.ModelProto:
    """RetinaNet's last convolution of boxes, 256 channels of 20 x 20 to 36, behind one that makes them."""
    m = Branchy((1, 64, 20, 20))
    return m.model(m.conv(m.conv("x", 64, 256), 256, 36, 3, relu=False))


PARTLY: dict[str, Callable[[], onnx.ModelProto]] = {
    "deeplab_head": deeplab_head, "dilated_stage": dilated_stage, "denoiser": denoiser, "srcnn": srcnn,
    "retina_head": retina_head,
}  # fmt: skip
