"""Cut a model into parts for several accelerators, where the timing model estimates equal times."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx.utils import Extractor

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importer import import_model, open_model, read
from celosia.compiler.graph.importing.dimensions import Shapes, sizes_of, with_shapes
from celosia.compiler.graph.importing.inlining import inline_functions
from celosia.compiler.graph.importing.shape_inference import with_inferred_shapes
from celosia.compiler.graph.shapes import infer_shapes
from celosia.compiler.graph.values import name_nodes, operands
from celosia.compiler.program import Program
from celosia.driver.run.explain import estimate
from celosia.driver.run.open_device import Devices, devices_of
from celosia.driver.run.stream import LANES, Results, Sample
from celosia.driver.runtime import Runtime
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config

BYTES: tuple[ir.DataType | None, ...] = ir.DataType.INT8, ir.DataType.UINT8
"""Types of the tensors at which a model is cut."""


def cut(
    model: str | Path, parts: int = 2, config: str | Path | Config = "pynq", memory: MemoryModel | str = ZYNQ_HP,
    shapes: Shapes | None = None,
) -> list[onnx.ModelProto]:  # fmt: skip
    """Cut a model into parts, each of which takes the output of the one before: one 8-bit tensor.

    A place to cut is a tensor that alone feeds all later operators. The chosen places give the longest part the fewest
    cycles, by the timing model with this memory.

    Args:
        model: Path of an ONNX model.
        parts: Number of parts.
        config: Accelerator, as `celosia.compile` takes it.
        memory: Memory model: a MemoryModel, its name, or a board's .toml file.
        shapes: Shapes of inputs by name, for all parts, if the model leaves sizes open. None: no shape is fixed.

    Returns:
        The parts as ONNX models, in the order in which they run.

    Raises:
        ModelError: The model has too few tensors where it can be cut, or `celosia.compile` does not support it.
        ConfigError: The Config is invalid, or there is none of that name.
        ValueError: There is no such memory model.

    Examples:
        >>> import celosia
        >>> [len(part.graph.output) for part in celosia.cut(celosia.models.demo_model_path(), 2, "tiny")]
        [1, 1]
    """
    source_model, shapes = read(Path(model)), shapes or {}
    import_model(*open_model(source_model))  # raises the error of a model that cannot be compiled
    fixed = with_shapes(source_model, shapes, sizes_of(source_model, shapes))
    named = ir.from_proto(with_inferred_shapes(inline_functions(fixed)))
    infer_shapes(named)
    name_nodes(named.graph)  # the timing model reports cycles by name
    proto = ir.to_proto(named)
    places = _find_cut_points(named.graph)
    if parts < 1 or len(places) < parts - 1:
        raise ModelError(
            f"{model} can be cut in {len(places) + 1} parts at most, at 8-bit tensors that all of the rest needs and "
            f"nothing else; not in {parts}"
        )
    program = compile_model(proto, config, check=False)
    before = _sum_cycles_before(proto, program, memory, [place for place, _ in places])
    total = before.pop()
    ends = [places[number][1] for number in _balance_parts(before, total, parts)]
    input_names, output_names = ([value.name for value in values] for values in (proto.graph.input, proto.graph.output))
    constants = {initializer.name for initializer in proto.graph.initializer}
    inputs = [name for name in input_names if name not in constants]
    extract = Extractor(proto).extract_model
    borders = [inputs, *([end] for end in ends), output_names]  # inputs and outputs of the parts
    return [extract(begin, end) for begin, end in pairwise(borders)]


def _find_cut_points(graph: ir.Graph) -> list[tuple[int, str]]:
    """Return (number of its node, name) of each 8-bit tensor on which alone all later operators depend.

    Constants do not count: only tensors that depend on inputs do.
    """
    live = {value for value in graph.inputs if value.name not in graph.initializers}
    varying = set(live)
    last_use = {value: number for number, node in enumerate(graph) for value in operands(node)}
    last_use |= dict.fromkeys(graph.outputs, len(graph))
    cuts = []
    for number, node in enumerate(graph):
        if varying.isdisjoint(operands(node)):
            continue
        varying.update(node.outputs)
        live = {value for value in (*live, *node.outputs) if last_use.get(value, -1) > number}
        if len(live) == 1:
            (only,) = live
            if only in node.outputs and only.dtype in BYTES and only.shape is not None and only.name:
                cuts.append((number, only.name))
    return cuts


def _sum_cycles_before(
    proto: onnx.ModelProto, program: Program, memory: MemoryModel | str, places: Sequence[int]
) -> list[int]:
    """Return the cycles of the layers before each of `places`, by the timing model, and then those of all layers.

    A layer is before a place if its last operator is a node up to that number.
    """
    numbers = {node.name: number for number, node in enumerate(proto.graph.node)}
    cycles_before = [0] * (len(places) + 1)
    for row in estimate(program, memory)["layers"]:
        names = re.split(r" (?:\.\.|\|) ", row["name"])  # the name of a block has the first and the last of each group
        last = max((numbers[name] for name in names if name in numbers), default=-1)
        for number, place in enumerate((*places, len(numbers))):
            cycles_before[number] += row["cycles"] * (last <= place)
    return cycles_before


def _balance_parts(before: Sequence[int], total: int, parts: int) -> list[int]:
    """Choose `parts` - 1 places to cut, so that the longest part is as short as possible. Return their numbers.

    before: cycles in front of each place. total: cycles of all.
    """
    # For each place as an end: the cycles of the longest part before it, and the places where it is cut.
    best: list[tuple[int, list[int]]] = [(cycles, []) for cycles in (*before, total)]
    for _ in range(parts - 1):
        best = [
            min(
                ((max(longest, end - before[k]), [*cuts, k]) for k, (longest, cuts) in enumerate(best[:number])),
                default=(total + 1, [*range(parts)]),
            )
            for number, end in enumerate((*before, total))
        ]
    return best[-1][1]


class Relay:
    """Pipeline of Programs, each on its own device: the outputs of one are the inputs of the next.

    All work at the same time, on different samples. programs: in their order. device, threads: see Runtime; there are
    as many devices as Programs, or one name for all.
    """

    def __init__(
        self, programs: Sequence[Program], device: Devices = "functional", threads: int | None = None, **options: Any
    ) -> None:
        devices = devices_of(device)
        devices = devices * len(programs) if len(devices) == 1 and isinstance(devices[0], str) else devices
        if len(devices) != len(programs):
            raise ValueError(f"there are {len(programs)} Programs and {len(devices)} devices; give one for each")
        self.runtimes = [Runtime(program, device, threads, **options) for program, device in zip(programs, devices)]

    def run_each(self, samples: Iterable[Sample], in_flight: int = LANES, trace: bool = True) -> Results:
        """Return the results of the last Program for each sample of the first one; see Runtime.run_each."""
        first, *later_runtimes = self.runtimes
        results = first.run_each(samples, in_flight, trace)
        for runtime in later_runtimes:
            results = runtime.run_each(_outputs_for_next(results), in_flight, trace)
        return results

    def close(self) -> None:
        """Release the devices."""
        for runtime in self.runtimes:
            runtime.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _outputs_for_next(results: Results) -> Iterator[Sample]:
    """Yield the outputs of each result as a sample of the next Program; an error passes on as the sample."""
    try:
        while True:
            try:
                yield next(results).outputs
            except StopIteration:
                return
            except Exception as error:
                if results.ended:
                    raise
                yield error
    finally:
        results.close()
