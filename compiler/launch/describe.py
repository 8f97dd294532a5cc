"""Describe a layer in a few words."""

from __future__ import annotations

from celosia.compiler.graph.select.forms import ActivationLayout
from celosia.compiler.layer import (
    ActivationProduct,
    Block,
    Conv,
    Epilogue,
    Layer,
    Multiply,
    Norm,
    Pool,
    Softmax,
    Window,
)


def describe(layer: Layer, form: ActivationLayout | None = None) -> str:
    """Kind, kernel, stride, channels, groups, and what is fused into the layer.

    form: how the host arranges the layer's input, where a part of its window is folded into channels.
    """
    if isinstance(layer, Block):
        return " > ".join(describe(each, form if each is layer.layers[0] else None) for each in layer.layers)
    return " + ".join([_anchor(layer, form), *_fused(layer.epilogue)])


def _anchor(layer: Layer, form: ActivationLayout | None) -> str:
    if isinstance(layer, Conv):
        return _convolution(layer, form)
    if isinstance(layer, Pool):
        kind = "max pool" if layer.requantise is None else "sum pool"
        return f"{kind} {_window(layer.window)}, {layer.x.channels} channels"
    if isinstance(layer, ActivationProduct) and layer.moves:
        return f"matrix turned {layer.y.channels}x{layer.y.width}"
    if isinstance(layer, ActivationProduct):
        sizes = "→".join(str(act.channels // layer.heads) for act in (layer.x, layer.y))
        return _heads(layer) + f"product of two activations {sizes}"
    if isinstance(layer, Softmax):
        return _heads(layer) + f"softmax of {layer.count}"
    if isinstance(layer, Norm):
        return f"{'layer' if layer.centre else 'RMS'} norm of {layer.count}"
    if isinstance(layer, Multiply):
        same = layer.b.dims == layer.x.dims
        return f"multiply, {layer.x.channels} channels" + ("" if same else " by one value each")
    return f"elementwise, {layer.x.channels} channels"


def _heads(layer: ActivationProduct | Softmax) -> str:
    return f"{layer.heads} × " if layer.heads > 1 else ""


def _convolution(layer: Conv, form: ActivationLayout | None) -> str:
    window, channels = layer.window, layer.x.channels
    folded = form is not None and form.fold and form.window is not None
    if folded:
        assert form is not None and form.window is not None
        window = form.window
        channels //= window.kernel[1] * (window.kernel[0] if form.fold == "xy" else 1)
    sizes = f"{channels}→{layer.y.channels}"
    if window.pointwise and (layer.x.height, layer.x.width) == (1, 1):
        return f"product {sizes}"
    kind = f"conv {_window(window)}"
    if layer.groups > 1 and layer.groups == channels:
        kind, sizes = f"depthwise {kind}", str(channels) if layer.y.channels == channels else sizes
    elif layer.groups > 1:
        kind = f"{kind}, {layer.groups} groups"
    return f"{kind}, {sizes}" + (", folded by the host" if folded else "")


def _window(window: Window) -> str:
    text = "x".join(map(str, window.kernel))
    if window.strides != (1, 1):
        text += f" stride {'x'.join(map(str, dict.fromkeys(window.strides)))}"
    if window.dilations != (1, 1):
        text += f" dilation {'x'.join(map(str, dict.fromkeys(window.dilations)))}"
    return text


def _fused(epilogue: Epilogue) -> list[str]:
    parts = []
    if epilogue.clip != (-128, 127):
        parts.append("clip")
    if epilogue.table is not None:
        parts.append("table")
    if epilogue.residual is not None:
        parts.append("add")
    return parts
