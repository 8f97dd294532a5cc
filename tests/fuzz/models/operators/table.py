"""List the operators that are drawn; those with more variants are drawn more often."""

from __future__ import annotations

from fuzz.models.net import Draw, Net, OracleError
from fuzz.models.operators.elementwise import (
    binary,
    bits,
    cast,
    clip,
    comparison,
    of_integers,
    unary,
    unary_with_attributes,
    variadic,
    where,
)
from fuzz.models.operators.integers import (
    dequantize,
    dynamic_quantize,
    integer_product,
    qlinear_binary,
    qlinear_concat,
    qlinear_conv,
    qlinear_pool,
    qlinear_softmax,
    qlinear_unary,
    qlinear_where,
    quantize,
)
from fuzz.models.operators.movement import generator, movement
from fuzz.models.operators.operands import (
    Make,
)
from fuzz.models.operators.several import layer_norm, normalisation, recurrent
from fuzz.models.operators.sums import (
    arg,
    cumsum,
    einsum,
    fused_matmul,
    gemm,
    matmul,
    reduction,
    softmax,
    top_k,
)
from fuzz.models.operators.windows import conv, conv_transpose, global_pool, grid_sample, pool, resize

TRIES = 20


def operator(draw: Draw, opset: int) -> Net:
    """Draw a model of one operator that onnxruntime runs. Raise OracleError if all tries are refused."""
    make = draw.choice(OPERATORS)
    for _ in range(TRIES):
        net = Net(draw, opset)
        try:
            net.outputs = [name for name in make(net) if name]
        except OracleError:
            continue
        if all(name in net.values for name in net.outputs):
            return net
    raise OracleError(f"onnxruntime refuses all that was drawn of {make.__name__}")


OPERATORS: tuple[Make, ...] = (
    unary, unary, unary_with_attributes, of_integers, clip, binary, binary, comparison, bits, variadic, where, cast,
    reduction, reduction, reduction, arg, softmax, cumsum, top_k, matmul, matmul, fused_matmul, gemm, gemm, einsum,
    conv, conv, conv_transpose, pool, pool, global_pool, resize, resize, grid_sample, *[movement] * 8, generator,
    normalisation, normalisation, layer_norm, recurrent, recurrent, quantize, dequantize, dynamic_quantize,
    qlinear_binary, qlinear_binary, qlinear_unary, qlinear_softmax, qlinear_concat, qlinear_where, qlinear_pool,
    qlinear_conv, qlinear_conv, integer_product, integer_product,
)  # fmt: skip
