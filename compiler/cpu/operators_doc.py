"""Generator of docs/operators.md: python -m celosia.compiler.cpu.operators_doc > docs/operators.md"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

import onnx

from celosia.compiler.ops import OPS, op_spec
from celosia.compiler.program.host import hostops
from celosia.compiler.program.host.hostops import HOST, NUMPY_FIRST, sized_names

INTRODUCTION = """\
# Operators

This page lists the operators that Celosia runs, and how. Every operator of ONNX's own domain runs. An integer operator
runs on the accelerator if a layer can compute it; `celosia inspect` prints where each operator of a model runs and why.
All others run on the CPU, in one of three ways. You can add
[an operator of your own](language.md#an-operator-of-your-own) without changing Celosia.
"""

NOT_MOVED = {
    "Transpose that moves channels of images, but before a product that flattens the image; Gather of images": "the "
    "channels of a group share an entry, and the images of a batch share a piece",
    "Slice and Split of channels that begin within a channel group, and that also cut rows or columns": "a product by "
    "zeros and ones takes such channels, of all pixels",
    "Gather of more than 16 evenly spaced runs of rows or columns; Transpose of more than 16 columns; SpaceToDepth and "
    "DepthToSpace with blocks larger than 4 × 4": "an operator may take at most 16 layers, and each run, column or "
    "place in a block takes one",
    "Slice and Gather with indices that are not constant; GatherElements; GatherND": "the addresses in instructions "
    "are constants",
}
"""Operators on bytes that the accelerator leaves to kernels -> the reason."""

_ONNX = (  # operators of ONNX's own domain
    "Abs", "Add", "AveragePool", "BitCast", "Cast", "Clip", "Concat", "Constant", "ConstantOfShape", "Conv",
    "ConvInteger", "DequantizeLinear", "Div", "DynamicQuantizeLinear", "Floor", "Gather", "Gelu", "Gemm",
    "GlobalAveragePool", "HardSigmoid", "Identity", "If", "InstanceNormalization", "LayerNormalization",
    "LpNormalization", "MatMul", "MatMulInteger", "Max", "Mul", "Pow", "QLinearConv", "QLinearMatMul",
    "QuantizeLinear", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Relu", "Reshape", "Shape", "Slice",
    "Sqrt", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze",
)  # fmt: skip
OF_QUANTISERS: dict[str, tuple[str, ...]] = {
    "onnxruntime.quantization, neural-compressor, Olive, nncf": (
        *_ONNX, "com.microsoft.DequantizeLinear", "com.microsoft.DynamicQuantizeLSTM",
        "com.microsoft.GatherBlockQuantized", "com.microsoft.GroupQueryAttention", "com.microsoft.MatMulBnb4",
        "com.microsoft.MatMulIntegerToFloat", "com.microsoft.MatMulNBits", "com.microsoft.QAttention",
        "com.microsoft.QEmbedLayerNormalization", "com.microsoft.QGemm", "com.microsoft.QLinearAdd",
        "com.microsoft.QLinearAveragePool", "com.microsoft.QLinearConcat", "com.microsoft.QLinearGlobalAveragePool",
        "com.microsoft.QLinearLeakyRelu", "com.microsoft.QLinearMul", "com.microsoft.QLinearSigmoid",
        "com.microsoft.QLinearSoftmax", "com.microsoft.QLinearWhere", "com.microsoft.QuantizeLinear",
        "com.microsoft.SkipSimplifiedLayerNormalization",
    ),
    "Quark": (
        "com.amd.quark.BFPQuantizeDequantize", "com.amd.quark.ExtendedDequantizeLinear",
        "com.amd.quark.ExtendedInstanceNormalization", "com.amd.quark.ExtendedLSTM",
        "com.amd.quark.ExtendedQuantizeLinear", "com.amd.quark.MXQuantizeDequantize", "com.vai.quantize.BFPFixNeuron",
        "com.vai.quantize.FixNeuron", "com.vai.quantize.MXFixNeuron", "com.vai.quantize.VitisDequantizeLinear",
        "com.vai.quantize.VitisInstanceNormalization", "com.vai.quantize.VitisLSTM",
        "com.vai.quantize.VitisQuantizeLinear",
    ),
    "ModelOpt for TensorRT": (
        "trt.DequantizeLinear", "trt.TRT_FP4DynamicQuantize", "trt.TRT_FP4QDQ", "trt.TRT_FP8DequantizeLinear",
        "trt.TRT_FP8QuantizeLinear", "trt.TRT_INT4DequantizeLinear", "trt.TRT_INT4QuantizeLinear",
        "trt.TRT_MXFP8DequantizeLinear", "trt.TRT_MXFP8DynamicQuantize",
    ),
    "brevitas as QONNX": tuple(
        f"qonnx.custom_op.general.{name}" for name in ("BipolarQuant", "FloatQuant", "Quant", "QuantLSTMCell", "Trunc")
    ),
    "AIMET's simulation": ("aimet.customop.cpu.QcQuantizeOp",),
}  # fmt: skip
"""Quantiser -> operators that it adds to a network; those that are not supported are listed as missing."""


def is_supported(operator: str) -> bool:
    """Return whether an operator of OF_QUANTISERS has an implementation."""
    domain, _, name = operator.rpartition(".")
    if domain not in ("", "com.microsoft"):
        return (domain, name) in HOST
    return name in OPS or operator in OPS or (domain, name) in HOST or ("", name) in HOST


def _list(names: Iterable[str]) -> str:
    """Return names in order, separated by commas, in lines of text."""
    return textwrap.fill(", ".join(sorted(names)) + ".", 116, break_on_hyphens=False)


def operators_markdown() -> str:
    """Return the text of docs/operators.md."""
    # Operators that a user registered are left out, and those of our own domain, which only the compiler makes.
    hosted = [key for key, function in HOST.items() if function.__module__.startswith(hostops.__name__)]
    implemented = {*OPS, *(op for _, op in hosted)}
    compiled = [name for name in OPS if op_spec(name).domain != "celosia"]
    newest = {(s.domain, s.name): s for s in onnx.defs.get_all_schemas() if not s.deprecated}
    defined = {key for key, s in newest.items() if s.has_function or s.has_context_dependent_function}
    functions = {name for domain, name in defined if domain in ("", "ai.onnx.preview") and name not in implemented}
    plain = [op for domain, op in hosted if not domain and op not in OPS]
    others = [f"{domain}.{op}" for domain, op in hosted if domain]
    missing = [
        f"{domain}.{name}".lstrip(".") for (domain, name) in newest
        if (domain, name) not in hosted and name not in functions and (domain or name not in OPS)
        and name != "Gradient"  # becomes nodes, see graph/importing/inlining.py
    ]  # fmt: skip
    parts = [
        INTRODUCTION, "## Compiled to machine code\n", _list(compiled), "",
        "Neighbouring operators share a kernel. If shapes are known only at run time, the kernel is compiled then and\n"
        "kept. If a Program leaves a size open, such as the length of a cache, numpy computes these instead:\n",
        _list(sized_names()), "",
        "## In the host runtime\n",
        "numpy computes control flow, sequences, strings, and other operators that are no loop over elements.\n",
        _list(plain), "", "Operators of other domains:\n", _list(others), "",
        "numpy also computes these operators if no kernel can (other element types, training, sequences of no steps,\n"
        "shapes that a board learns at run time), or if compiling a kernel would take longer:\n",
        _list({op for _, op in hosted if op in OPS} | NUMPY_FIRST), "",
        "## Bytes that the accelerator does not move\n",
        "LOAD and STORE move channel groups of whole pixels, with one stride for rows and one for columns.",
        "Therefore the CPU computes these operators:\n",
        "| | why |\n|---|---|", *(f"| {operators} | {reason} |" for operators, reason in NOT_MOVED.items()), "",
        "## As functions of other operators\n",
        "ONNX defines these operators by others, and the importer replaces each by its definition.\n",
        _list(functions), "",
    ]  # fmt: skip
    parts += ["## Not yet\n", "`celosia compile` refuses a model with one of these operators.\n", _list(missing), ""]
    for quantiser, operators in OF_QUANTISERS.items():
        if missing := [name for name in operators if not is_supported(name)]:
            parts += [f"Operators in models from {quantiser}:\n", _list(missing), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    print(operators_markdown(), end="")
