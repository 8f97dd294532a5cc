"""Networks with branches as they were published, with random weights: what the superoptimiser is measured on, too."""

from __future__ import annotations

import numpy as np
import onnx

from benchmarks.branches import Branchy


def _chain(m: Branchy, x: str, channels: int, *steps: tuple[int, int | tuple[int, int]], stride: int = 1) -> str:
    """Convolutions one after the other, (outputs, kernel) each; stride: of the last one, which is not padded then."""
    for number, (outputs, kernel) in enumerate(steps):
        strided = stride > 1 and number == len(steps) - 1
        x = m.conv(x, channels, outputs, kernel, stride if strided else 1, pad=0 if strided else None)
        channels = outputs
    return x


def _average(m: Branchy, x: str, channels: int, outputs: int) -> str:
    return m.conv(m.pool(x, 3, 1, "AveragePool"), channels, outputs)


def _first(m: Branchy, x: str, channels: int, pooled: int) -> str:
    branches = (
        m.conv(x, channels, 64), _chain(m, x, channels, (48, 1), (64, 5)),
        _chain(m, x, channels, (64, 1), (96, 3), (96, 3)), _average(m, x, channels, pooled),
    )  # fmt: skip
    return m.op("Concat", *branches, axis=1)


def _middle(m: Branchy, x: str, inner: int) -> str:
    row, column = (1, 7), (7, 1)
    branches = (
        m.conv(x, 768, 192), _chain(m, x, 768, (inner, 1), (inner, row), (192, column)),
        _chain(m, x, 768, (inner, 1), (inner, column), (inner, row), (inner, column), (192, row)),
        _average(m, x, 768, 192),
    )  # fmt: skip
    return m.op("Concat", *branches, axis=1)


def _last(m: Branchy, x: str, channels: int) -> str:
    def both(t: str, inputs: int) -> str:
        return m.op("Concat", m.conv(t, inputs, 384, (1, 3)), m.conv(t, inputs, 384, (3, 1)), axis=1)

    branches = (
        m.conv(x, channels, 320), both(m.conv(x, channels, 384), 384),
        both(_chain(m, x, channels, (448, 1), (384, 3)), 384), _average(m, x, channels, 192),
    )  # fmt: skip
    return m.op("Concat", *branches, axis=1)


def inception_v3() -> onnx.ModelProto:
    """Inception v3 at 299 x 299, without the auxiliary head."""
    m = Branchy((1, 3, 299, 299))
    x = m.conv(m.conv(m.conv("x", 3, 32, 3, 2, pad=0), 32, 32, 3, pad=0), 32, 64, 3)
    x = m.conv(m.conv(m.pool(x, 3, 2, pad=0), 64, 80), 80, 192, 3, pad=0)
    x = m.pool(x, 3, 2, pad=0)
    for channels, pooled in ((192, 32), (256, 64), (288, 64)):
        x = _first(m, x, channels, pooled)
    branches = m.conv(x, 288, 384, 3, 2, pad=0), _chain(m, x, 288, (64, 1), (96, 3), (96, 3), stride=2)
    x = m.op("Concat", *branches, m.pool(x, 3, 2, pad=0), axis=1)
    for inner in (128, 160, 160, 192):
        x = _middle(m, x, inner)
    branches = (
        _chain(m, x, 768, (192, 1), (320, 3), stride=2),
        _chain(m, x, 768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), stride=2),
    )
    x = m.op("Concat", *branches, m.pool(x, 3, 2, pad=0), axis=1)
    for channels in (1280, 2048):
        x = _last(m, x, channels)
    x = m.op("Flatten", m.op("GlobalAveragePool", x))
    return m.model(m.linear(x, 2048, 1000))


def inception_v3_first() -> onnx.ModelProto:
    """The first block of Inception v3, 192 channels of 35 x 35, and the 1x1 convolutions that read it."""
    m = Branchy((1, 80, 37, 37))
    x = _first(m, m.conv("x", 80, 192, 3, pad=0), 192, 32)
    return m.model(*(m.conv(x, 256, outputs) for outputs in (64, 48, 64)))


def inception_v3_middle() -> onnx.ModelProto:
    """A block of Inception v3 with rows and columns of seven, 768 channels of 17 x 17."""
    m = Branchy((1, 192, 17, 17))
    return m.model(m.conv(_middle(m, m.conv("x", 192, 768), 128), 768, 192))


def inception_v3_last() -> onnx.ModelProto:
    """The last but one block of Inception v3, 1,280 channels of 8 x 8."""
    m = Branchy((1, 192, 8, 8))
    return m.model(m.conv(_last(m, m.conv("x", 192, 1280), 1280), 2048, 192))


def resnext50() -> onnx.ModelProto:
    """ResNeXt-50 (32 x 4d) at 224 x 224."""
    m = Branchy((1, 3, 224, 224))
    x, channels = m.pool(m.conv("x", 3, 64, 7, 2), 3, 2), 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner, outputs = 128 << stage, 256 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = m.conv(m.conv(x, channels, inner), inner, inner, 3, stride, group=32)
            y = m.conv(y, inner, outputs, relu=False)
            if channels != outputs:
                x, channels = m.conv(x, channels, outputs, 1, stride, relu=False), outputs
            x = m.op("Relu", m.op("Add", y, x))
    return m.model(m.linear(m.op("Flatten", m.op("GlobalAveragePool", x)), channels, 1000))


def _bottleneck(m: Branchy, x: str, channels: int, inner: int, stride: int = 1) -> str:
    """A block of ResNet as first published, whose strides are in its 1x1 convolutions, not in the 3x3 one."""
    y = m.conv(m.conv(m.conv(x, channels, inner, 1, stride), inner, inner, 3), inner, 4 * inner, relu=False)
    if stride > 1 or channels != 4 * inner:
        x = m.conv(x, channels, 4 * inner, 1, stride, relu=False)
    return m.op("Relu", m.op("Add", y, x))


def resnet_v1_stage() -> onnx.ModelProto:
    """The last block of one stage of ResNet-50 and the first of the next, 512 channels of 28 x 28 to 1,024 of half."""
    m = Branchy((1, 512, 28, 28))
    return m.model(_bottleneck(m, _bottleneck(m, "x", 512, 128), 512, 256, 2))


def resnet50_v1() -> onnx.ModelProto:
    """ResNet-50 at 224 x 224 as first published (He et al., 2015) and as Keras and Detectron have it."""
    m = Branchy((1, 3, 224, 224))
    x, channels = m.pool(m.conv("x", 3, 64, 7, 2), 3, 2), 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            x = _bottleneck(m, x, channels, 64 << stage, 2 if stage and not block else 1)
            channels = 256 << stage
    return m.model(m.linear(m.op("Flatten", m.op("GlobalAveragePool", x)), channels, 1000))


def causal() -> onnx.ModelProto:
    """Four blocks of a temporal convolutional network (Bai et al., 2018), 64 channels, 512 steps: each convolution is
    padded on both sides, and a Slice takes off what lies in the future."""
    m = Branchy((1, 64, 1, 512))
    x = "x"
    for rate in (1, 2, 4, 8):
        y = x
        for _ in range(2):
            given = {"pads": [0, 2 * rate, 0, 2 * rate], "dilations": [1, rate]}
            w, b = m.random.normal(size=(64, 64, 1, 3)) / 14, m.random.normal(size=64) * 0.1
            y = m.op("Conv", y, m.constant(w), m.constant(b), **given)
            y = m.op("Relu", m.op("Slice", y, *(m.constant([each], np.int64) for each in (0, -2 * rate, 3))))
        x = m.op("Relu", m.op("Add", y, x))
    return m.model(x)


def nasnet_cells() -> onnx.ModelProto:
    """Two normal cells of NASNet-A with 44 filters, at 28 x 28, as NASNet-A mobile has them."""
    m = Branchy((1, 44, 28, 28))
    f = 44

    def separable(t: str, kernel: int) -> str:
        for _ in range(2):
            t = m.conv(m.conv(t, f, f, kernel, group=f, relu=False), f, f)
        return t

    def cell(before: str, x: str, channels: tuple[int, int]) -> str:
        p, h = m.conv(before, channels[0], f), m.conv(x, channels[1], f)
        average = [m.pool(each, 3, 1, "AveragePool") for each in (p, h)]
        sums = (
            m.op("Add", separable(h, 3), h), m.op("Add", separable(p, 3), separable(h, 5)),
            m.op("Add", average[1], p), m.op("Add", average[0], average[0]),
            m.op("Add", separable(p, 5), separable(p, 3)),
        )  # fmt: skip
        return m.op("Concat", p, *sums, axis=1)

    x = m.conv("x", f, f)
    first = cell("x", x, (f, f))
    return m.model(m.conv(cell(x, first, (f, 6 * f)), 6 * f, f))


PUBLISHED = {
    "inception_v3_first": inception_v3_first, "inception_v3_middle": inception_v3_middle,
    "inception_v3_last": inception_v3_last, "nasnet_cells": nasnet_cells, "resnext50": resnext50,
}  # fmt: skip
STRIDED = {"resnet_v1_stage": resnet_v1_stage, "resnet50_v1": resnet50_v1, "causal": causal}
"""Networks that compute pixels which a stride or a Slice behind them drops."""
WHOLE = {"inception_v3": inception_v3}
"""What takes the compiler most of a minute each time that it is priced."""
