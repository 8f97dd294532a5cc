"""Describe a layer in a few words, for reports."""

from __future__ import annotations

from celosia.compiler.graph.select.forms import ActivationLayout
from celosia.compiler.layer import Epilogue, Gemm, Layer, Window


def describe(layer: Layer, form: ActivationLayout | None = None) -> str:
    """Describe a layer: kind, kernel, stride, channels, groups, and fused operations.

    form: layout in which the host arranges the layer's input, if it folds part of the window into channels.
    """
    if layer.is_block:
        return " > ".join(describe(member, form if member is layer.layers[0] else None) for member in layer.layers)
    return " + ".join([_operation(layer, form), *_fused_operations(layer.epilogue)])


def _operation(layer: Layer, form: ActivationLayout | None) -> str:
    """Describe the first operation of a layer."""
    heads = f"{layer.heads} × " if layer.heads > 1 else ""
    if layer.gemm is not None:
        return _convolution(layer, layer.gemm, form)
    if layer.product is not None and layer.product.transposes:
        return f"matrix turned {layer.y.channels}x{layer.y.width}"
    if layer.product is not None:
        return f"{heads}product of two activations {layer.row_length}→{layer.y.channels // layer.heads}"
    if layer.reduce:
        return f"{layer.reduce} pool {_window(layer.window)}, {layer.x.channels} channels"
    if layer.softmax is not None:
        return f"{heads}softmax of {layer.row_length}"
    if layer.norm is not None:
        return f"{'layer' if layer.norm.centre else 'RMS'} norm of {layer.row_length}"
    if layer.multiply is not None:
        same_dims = layer.multiply.b.dims == layer.x.dims
        return f"multiply, {layer.x.channels} channels" + ("" if same_dims else " by one value each")
    return f"elementwise, {layer.x.channels} channels"


def _convolution(layer: Layer, gemm: Gemm, form: ActivationLayout | None) -> str:
    """Describe a product with constant weights, as a matrix product or a convolution."""
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
    if gemm.groups > 1 and gemm.groups == channels:
        kind, sizes = f"depthwise {kind}", str(channels) if layer.y.channels == channels else sizes
    elif gemm.groups > 1:
        kind = f"{kind}, {gemm.groups} groups"
    return f"{kind}, {sizes}" + (", folded by the host" if folded else "")


def _window(window: Window) -> str:
    """Return the kernel of a window as text, with strides and dilations that are not 1."""
    text = "x".join(map(str, window.kernel))
    if window.strides != (1, 1):
        text += f" stride {'x'.join(map(str, dict.fromkeys(window.strides)))}"
    if window.dilations != (1, 1):
        text += f" dilation {'x'.join(map(str, dict.fromkeys(window.dilations)))}"
    return text


def _fused_operations(epilogue: Epilogue) -> list[str]:
    """Return the names of the operations in an epilogue."""
    parts = []
    if epilogue.clip != (-128, 127):
        parts.append("clip")
    if epilogue.table is not None:
        parts.append("table")
    if epilogue.residual is not None:
        parts.append("add")
    return parts
