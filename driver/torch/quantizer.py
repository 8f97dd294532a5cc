"""A Quantizer for PT2E (torchao.quantization.pt2e) that annotates a model for the accelerator.

Operators that only move elements, maxima of windows, and the parts of a concatenation share one scale, so that nothing
is computed between them. Biases stay float: the compiler rounds them to int32, in units of the input's scale times the
weights' scale, as onnxruntime does. Operands of products of two activations have zero point 0, since another one would
be multiplied, too. Masks, and sums with them, stay float up to the softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import (
    FusedMovingAvgObsFakeQuantize,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
    Quantizer,
    SharedQuantizationSpec,
)

from celosia.driver.torch.decompose import expose_products
from celosia.driver.torch.products import MOVES, ActivationProducts, name_of, replace_splits_by_slices

KEY = "quantization_annotation"
"""Key of an operator's annotation for PT2E."""
SMALLEST_SCALE = 2.0**-16
"""Least scale, which channels with all weights zero get: a bias in smaller steps would not fit int32."""

# Operators as torch.export writes them; one name stands for its overloads and for the form that works in place.
PRODUCTS = {"conv1d", "conv2d", "linear"}
"""Products with weights [outputs, inputs / groups, ...]."""
TRANSPOSED = {"conv_transpose1d", "conv_transpose2d"}
"""Products with weights [inputs, outputs / groups, ...]."""
NORMS = {"batch_norm"}
"""Operators that PT2E folds into the product before them."""
CLAMPS = {"relu", "relu6", "hardtanh"}
"""Operators that fuse with the one before them if they clamp at 0: the range of the int8 result then does the clamping.
"""
BINARY = {"add", "mul"}
"""Operators on two activations."""
FUNCTIONS = CLAMPS | {
    "hardswish", "hardsigmoid", "sigmoid", "silu", "tanh", "gelu", "leaky_relu", "elu", "avg_pool2d",
    "adaptive_avg_pool2d", "mean", "softmax",
}  # fmt: skip
"""Operators on one activation that change its scale."""


class CelosiaQuantizer(Quantizer):  # type: ignore[misc]
    """Annotate a PyTorch model for PT2E as the accelerator computes it.

    Weights become symmetric int8 with a scale for each output channel. Activations become int8 with one scale and zero
    point, from the least and the largest value seen.

    Products with weights, and of two activations, are always quantised. Additions, functions, pooling, views and
    concatenations are quantised only if all their operands are quantised or inputs of the module. Operands of a product
    of two activations are symmetric, back to where they are computed.

    Args:
        qat: True for `prepare_qat_pt2e`, which trains with fake quantisation; False for `prepare_pt2e`.
        exclude: Names of submodules, as of `named_modules()`, that stay float with all that is inside them. By default
            none.
    """

    def __init__(self, *, qat: bool = False, exclude: Sequence[str] = ()) -> None:
        eps = SMALLEST_SCALE
        if qat:
            fake = FusedMovingAvgObsFakeQuantize
            activation = fake.with_args(observer=MovingAverageMinMaxObserver, eps=eps)
            weight = fake.with_args(observer=MovingAveragePerChannelMinMaxObserver, eps=eps)
        else:
            activation, weight = MinMaxObserver.with_args(eps=eps), PerChannelMinMaxObserver.with_args(eps=eps)
        self.tensor_observer = activation
        self.activation = QuantizationSpec(torch.int8, activation, -128, 127, torch.per_tensor_affine)
        self.symmetric_activation = replace(self.activation, qscheme=torch.per_tensor_symmetric)
        self.weight = QuantizationSpec(torch.int8, weight, -127, 127, torch.per_channel_symmetric, 0)
        self.exclude = tuple(exclude)

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate each operator of `model` with the quantisation of its inputs and output; PT2E calls this.

        ValueError for a name in `exclude` that no submodule has.
        """
        paths = {path for node in model.graph.nodes for path in _module_paths(node)}
        for name in self.exclude:
            if not any(_is_inside(path, name) for path in paths):
                raise ValueError(f"there is no submodule {name!r} to exclude; named_modules() lists them")
        self.products = ActivationProducts(model.graph, self._stays_float)
        quantised = {node for node in model.graph.nodes if node.op == "placeholder" and _is_float(node)}
        for node in model.graph.nodes:
            stays_float = self._stays_float(node) or node in self.products.masks
            if node.op == "call_function" and KEY not in node.meta and _is_float(node) and not stays_float:
                self._annotate(node, quantised)
        return model

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """PT2E's hook before `annotate`: decompose attention in `model`, in place, so that its products can be
        annotated."""
        expose_products(model, self._stays_float)
        replace_splits_by_slices(model, ActivationProducts(model.graph, self._stays_float))
        return model

    def validate(self, model: GraphModule) -> None:
        """Do nothing: PT2E requires this method, and all annotations of `annotate` are valid."""

    def _stays_float(self, node: Node) -> bool:
        """Whether a node is in an excluded submodule."""
        return any(_is_inside(path, name) for path in _module_paths(node) for name in self.exclude)

    def _annotate(self, node: Node, quantised: set[Node]) -> None:
        """Annotate one node by its kind, if it can be quantised, and add it to `quantised`.

        quantised: nodes so far whose results are quantised, and inputs.
        """
        op = name_of(node)
        first: Any = node.args[0] if node.args else None
        if op in PRODUCTS | TRANSPOSED:
            weight = self.weight if op in PRODUCTS else self._transposed_weight_spec(node)
            self._annotate_operator(node, {first: self._spec(first), node.args[1]: weight}, [NORMS, CLAMPS], quantised)
        elif node in self.products.nodes:
            self._annotate_operator(node, {operand: self._spec(operand) for operand in node.args[:2]}, [], quantised)
        elif op in BINARY and set(node.args[:2]) <= quantised and node.args[0] is not node.args[1]:
            self._annotate_operator(
                node, {operand: self._spec(operand) for operand in node.args[:2]}, [CLAMPS], quantised
            )
        elif (op in FUNCTIONS or self.products.is_scaling(node)) and first in quantised:
            self._annotate_operator(node, {first: self._spec(first)}, [], quantised)
        elif op in MOVES and first in quantised:
            self._share_scale(node, [first], quantised)
        elif op == "cat" and set(first) <= quantised:
            self._share_scale(node, list(first), quantised)

    def _transposed_weight_spec(self, node: Node) -> QuantizationSpec:
        """Return the quantisation of a transposed convolution's weights.

        Each output channel has a scale if one axis counts output channels: with one group, or a group for each channel.
        Else all channels share one scale.
        """
        groups = node.args[6] if len(node.args) > 6 else 1
        inputs, outputs = node.args[1].meta["val"].shape[:2]
        if groups == 1 or (groups == inputs and outputs == 1):
            return replace(self.weight, ch_axis=int(groups == 1))
        return replace(
            self.weight,
            observer_or_fake_quant_ctr=self.tensor_observer,
            qscheme=torch.per_tensor_symmetric,
            ch_axis=None,
        )

    def _spec(self, node: Node) -> QuantizationSpec:
        """Return the quantisation of an activation: symmetric for operands of products of two activations."""
        return self.symmetric_activation if node in self.products.operands else self.activation

    def _annotate_operator(
        self, node: Node, inputs: dict[Node, QuantizationSpecBase], followers: list[set[str]], quantised: set[Node]
    ) -> None:
        """Annotate `node` and the operators that fuse with it: its `inputs`, and the output of the last fused operator.

        followers: names of operators that may follow, in this order, each if it is the only reader of the one before.
        """
        node.meta[KEY] = QuantizationAnnotation(input_qspec_map=inputs, _annotated=True)
        for ops in followers:
            (user, *more_users) = node.users or [None]
            if user is None or more_users or name_of(user) not in ops or self._stays_float(user):
                continue
            if name_of(user) != "hardtanh" or user.args[1:2] == (0.0,):
                node = user
                node.meta[KEY] = QuantizationAnnotation(_annotated=True)
        node.meta[KEY].output_qspec = self._spec(node)
        quantised.add(node)

    def _share_scale(self, node: Node, parts: list[Node], quantised: set[Node]) -> None:
        """Annotate `node` so that its operands `parts` and its output share one scale."""
        shared = SharedQuantizationSpec((parts[0], node))
        inputs = {**dict.fromkeys(parts, shared), parts[0]: self._spec(parts[0])}
        node.meta[KEY] = QuantizationAnnotation(input_qspec_map=inputs, output_qspec=shared, _annotated=True)
        quantised.add(node)


def _is_float(node: Node) -> bool:
    """Whether a node computes a float32 tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def _module_paths(node: Node) -> list[str]:
    """Return the paths of the submodules that `node` is in, the innermost last."""
    return [path for path, _ in node.meta.get("nn_module_stack", {}).values()]


def _is_inside(path: str, name: str) -> bool:
    """Whether `path` is that of submodule `name`, or inside it. torch.export also writes paths as L['self'].name."""
    path = path.removeprefix("L['self']").removeprefix(".")
    return path == name or path.startswith(f"{name}.")
