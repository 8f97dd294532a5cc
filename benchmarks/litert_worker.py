"""Runs in a Python for aarch64 under qemu that has LiteRT, not in ours: python litert_worker.py CASES.npz MADE.npz

Runs int8 convolutions by LiteRT (ai-edge-litert, the later name of TensorFlow Lite) with XNNPACK and on one thread.
Prints where the code of its library lies, so that the emulator can count there alone, and between two runs of a
convolution closes a file that there is not: the emulator writes that into its log.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

FIRST_MARK = 9000
"""Number of the file that is closed in front of the counted run of the first convolution."""


def library() -> str:
    """First and last address of the interpreter's code, in hexadecimal."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        places = [line.split()[0].split("-") for line in lines if "r-xp" in line and "/ai_edge_litert/" in line]
    first, end = max(places, key=lambda each: int(each[1], 16) - int(each[0], 16))
    return f"{first} {end}"


def mark(number: int) -> None:
    """A line in the emulator's log."""
    with suppress(OSError):
        os.close(FIRST_MARK + number)


def model(case: dict[str, Any]) -> bytes:
    """A convolution as LiteRT's file: see paper_arm.Int8Conv.case."""
    import flatbuffers
    import numpy as np
    from ai_edge_litert import schema_py_generated as schema

    made, graph = schema.ModelT(), schema.SubGraphT()
    made.version, made.buffers, made.subgraphs, graph.tensors = 3, [schema.BufferT()], [graph], []
    x, w, by_channel = case["x"], case["w"], bool(case["by_channel"])
    outputs, axis = w.shape[3 if by_channel else 0], 3 if by_channel else 0

    def tensor(name: str, kind: int, shape: Any, scale: Any, zero: Any, data: Any = None, along: int = 0) -> int:
        each, buffer, quantisation = schema.TensorT(), schema.BufferT(), schema.QuantizationParametersT()
        buffer.data = None if data is None else np.frombuffer(data.tobytes(), np.uint8)
        made.buffers.append(buffer)
        quantisation.scale, quantisation.zeroPoint = np.float32(scale).reshape(-1), np.int64(zero).reshape(-1)
        quantisation.quantizedDimension = along
        each.name, each.type, each.shape, each.buffer = name.encode(), kind, list(shape), len(made.buffers) - 1
        each.quantization = quantisation
        graph.tensors.append(each)
        return len(graph.tensors) - 1

    nothing, kinds = np.zeros(outputs), schema.TensorType
    given = tensor("x", kinds.INT8, x.shape, case["sx"], case["zx"])
    weights = tensor("w", kinds.INT8, w.shape, case["sw"], nothing, w, axis)
    bias = tensor("bias", kinds.INT32, [outputs], case["sx"] * case["sw"], nothing, case["bias"])
    result = tensor("y", kinds.INT8, [1, *case["size"], outputs], case["sy"], case["zy"])
    graph.inputs, graph.outputs = [given], [result]
    kind = "DepthwiseConv2D" if by_channel else "Conv2D"
    options, code, node = getattr(schema, f"{kind}OptionsT")(), schema.OperatorCodeT(), schema.OperatorT()
    options.padding = schema.Padding.SAME if case["same"] else schema.Padding.VALID
    options.strideH = options.strideW = int(case["stride"])
    options.dilationHFactor = options.dilationWFactor = options.depthMultiplier = 1
    number = schema.BuiltinOperator.DEPTHWISE_CONV_2D if by_channel else schema.BuiltinOperator.CONV_2D
    code.builtinCode = code.deprecatedBuiltinCode = number
    code.version = 3
    node.inputs, node.outputs, node.opcodeIndex = [given, weights, bias], [result], 0
    node.builtinOptions, node.builtinOptionsType = options, getattr(schema.BuiltinOptions, f"{kind}Options")
    graph.operators, made.operatorCodes = [node], [code]
    builder = flatbuffers.Builder(1024)
    builder.Finish(made.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def main(cases_path: str, made_path: str) -> None:
    """Writes the output of each convolution."""
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    print(library(), flush=True)
    if not made_path:
        return
    cases: dict[int, dict[str, Any]] = {}
    with np.load(cases_path) as arrays:
        for name in arrays.files:
            number, key = name.split(".")
            cases.setdefault(int(number), {})[key] = arrays[name]
    made = {}
    for number, case in cases.items():
        interpreter = Interpreter(model_content=model(case), num_threads=1)
        interpreter.allocate_tensors()
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], case["x"])
        interpreter.invoke()
        mark(2 * number)
        interpreter.invoke()
        mark(2 * number + 1)
        made[str(number)] = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    np.savez(made_path, **made)


if __name__ == "__main__":
    main(*sys.argv[1:])
