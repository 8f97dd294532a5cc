"""Summary of a Program, for `compile` and `inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from celosia.compiler.program import CpuStep, LayerInfo, Program, ProgramError, with_inner_steps
from celosia.compiler.program.model import ROUNDINGS
from celosia.compiler.vthread.encode import disassemble
from celosia.compiler.vthread.verify import verify
from celosia.driver.run import explain
from celosia.driver.show.text_table import add_row, megabytes, new_table, percent
from celosia.hw.spec.isa import Opcode, instruction_bytes, opcode_of
from celosia.hw.spec.scratchpads import depths
from celosia.plain import printable


def overview(program: Program) -> RenderableType:
    """Return a table of model, Config, inputs and outputs, and how much of it runs where."""
    places = Counter(row["place"] for row in program.placements)
    table = Table(show_header=False, box=None, pad_edge=False)
    share = program.macs_accelerator / program.macs_total if program.macs_total else None
    cfg = program.config
    count = sum(launch.count for launch in program.launches)
    rows = [
        ("model", program.name),
        ("Config", f"{cfg.name}: batch {cfg.batch}, {cfg.block_in} x {cfg.block_out} MACs, {cfg.bus_bytes}-byte bus"),
        *(("input", f"{t.name}: {program.shape_text(t)}") for t in program.inputs),
        *(("output", f"{t.name}: {program.shape_text(t)}") for t in program.outputs),
        *([("n", f"any number of samples, {program.batch} at once")] if program.batched else []),
        ("operators", ", ".join(f"{places[place]} {verb}" for place, verb in _PLACES.items())),
        ("MACs", f"{program.macs_total:,}, {percent(share)} on the accelerator"),
        ("launches", f"{len(program.launches)}, {count:,} instructions of {instruction_bytes(cfg)} bytes"),
        *([("schedules", program.schedules)] if program.schedules else []),
        *([("rounding", _ROUNDING_NOTES[program.rounding])] if program.rounding != ROUNDINGS[0] else []),
        (
            "CPU",
            f"{len(program.kernels)} kernels, arena of {megabytes(program.arena.size)}, fusion saves "
            f"{megabytes(sum(step.saved_bytes for step in _kernel_steps(program)))} of reads and writes",
        ),
    ]
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(printable(value)))
    return table


def advice(program: Program) -> str | None:
    """Return advice for a model of which nothing runs on the accelerator because it is float; None for others."""
    rows = program.placements
    if any(row["place"] == "accelerator" for row in rows) or not any(
        "`celosia quantize`" in row["reason"] for row in rows
    ):
        return None
    return (
        "nothing of this model runs on the accelerator, for it is float; make an int8 model of it first: celosia "
        "quantize MODEL.onnx --calibration SAMPLES -o MODEL_int8.onnx"
    )


_ROUNDING_NOTES = {
    "correct": "correct: normalisations are the real numbers, rounded, but within 2^-14 of a step from a tie",
    "bytes": "bytes: float tensors between quantised ones are rounded to bytes, too; all else as with correct",
}
_PLACES = {"accelerator": "on the accelerator", "free": "free", "cpu": "on the CPU"}
"""Words for the places of operators; "free" ones need no work."""


def operators(program: Program) -> RenderableType:
    """Return a table of the operators: where each of the graph runs, and why."""
    table = new_table("Operators", "operator", "name", "place", "reason")
    for row in program.placements:
        add_row(table, row["op"], row["name"], row["place"], row["reason"])
    return table


def program_layers(program: Program) -> RenderableType:
    """Return a table of layers and their numbers of instructions; a GEMM or VECTOR instruction is one tile's work."""
    table = new_table(
        "Layers",
        "layer",
        "what",
        "operators",
        ">MACs",
        *(f">{op.name}" for op in Opcode),
        ">loaded",
        ">stored",
        ">kept on chip",
        "note",
    )
    for launch in program.launches:
        opcodes = [opcode_of(word) for word in program.instructions(launch)]
        for number, layer in enumerate(launch.layers):
            count = Counter(opcode for opcode, owner in zip(opcodes, launch.layer_of) if owner == number)
            add_row(
                table, layer.name, layer.what, ", ".join(layer.nodes), layer.macs, *(count[op] for op in Opcode),
                megabytes(layer.bytes_loaded), megabytes(layer.bytes_stored), megabytes(layer.bytes_kept), layer.note,
            )  # fmt: skip
    return table


def buffers(program: Program) -> RenderableType:
    """Return a table of DRAM, the CPU's arena and the scratchpads: contents and use."""
    cfg = program.config
    code = sum(launch.count for launch in program.launches) * instruction_bytes(cfg)
    table = new_table("Buffers", "buffer", ">size", ">used", "what")
    constants = len(program.image) - code
    arena = program.image_address
    add_row(table, "DRAM", megabytes(program.dram_size), "", "the whole")
    add_row(
        table,
        "  activations",
        megabytes(arena),
        megabytes(program.arena_lower_bound),
        "used: the least that any plan needs",
    )
    add_row(table, "  constants", megabytes(constants), megabytes(constants), "weights, parameters, tables")
    add_row(table, "  instructions", megabytes(code), megabytes(code), "")
    least = program.arena.lower_bound
    ratio_text = f", {program.arena.size / least:.3f} of that here" if least else ""
    add_row(
        table, "CPU arena", megabytes(program.arena.size), megabytes(least),
        f"{len(program.arena.offsets)} tensors between steps; used: the most that live at once{ratio_text}",
    )  # fmt: skip
    used: Counter[str] = Counter()
    for launch in program.launches:
        size = instruction_bytes(cfg)
        start = launch.address - program.image_address
        words = program.image[start : start + launch.count * size].reshape(launch.count, size)
        with explain.report_invalid_instructions(program):
            entries = verify(cfg, words, program.dram_size, (0, program.image_address)).entries
        used |= Counter(entries)
    for name in used:
        add_row(table, name, f"{depths(cfg)[name]:,} entries", f"{used[name]:,}", _SCRATCHPADS.get(name, ""))
    for number, launch in enumerate(program.launches):
        for pack in launch.pack:
            dims = "x".join(map(str, pack.form.dims))
            add_row(table, f"launch {number} in", hex(pack.address), "", f"{pack.value} as {dims}")
        for unpack in launch.unpack:
            dims = "x".join(map(str, unpack.form.dims))
            add_row(table, f"launch {number} out", hex(unpack.address), "", f"{unpack.value} as {dims}")
    return table


_SCRATCHPADS = {
    "inp": "activations for the multipliers",
    "wgt": "weights",
    "tap": "weights of depthwise convolutions",
    "book": "codebooks of packed weights",
    "acc": "int32 sums",
    "vin": "operands of the vector unit",
    "out": "results to be stored",
    "par": "scale, bias and shift of channels",
    "lut": "tables of 256 bytes",
    "exp": "powers for softmax",
}
"""Contents of the scratchpads."""


def passes(program: Program) -> RenderableType:
    """Return a table of the passes over the graph in order, and how many operators each left."""
    table = new_table("Passes", "pass", ">operators before", ">after", "what it does")
    for pass_ in program.passes:
        add_row(table, pass_.name, pass_.before, pass_.after, pass_.doc)
    return table


def kernels(program: Program) -> RenderableType:
    """Return a table of the CPU's kernels: the operators fused in each, and the reads and writes that fusion saves."""
    table = new_table("Kernels", ">kernel", "operators", ">saved traffic")
    for step in _kernel_steps(program):
        add_row(table, str(step.kernel), " ".join(node.op for node in step.nodes), megabytes(step.saved_bytes))
    add_row(table, "all", "", megabytes(sum(step.saved_bytes for step in _kernel_steps(program))))
    return table


def _kernel_steps(program: Program) -> list[CpuStep]:
    """Return the steps of a Program that run kernels of the CPU."""
    steps = with_inner_steps(program.steps)
    return [step for step in steps if isinstance(step, CpuStep) and step.kernel is not None]


def graphs(program: Program, texts: dict[str, str], only: str | None = None) -> Iterator[str]:
    """Yield the lines that show the graph after each pass that changed it.

    texts: the graph as text after each pass, by name; empty for a Program's file. only: the one pass to show.
    ProgramError where there is no such pass.
    """
    names = list(texts) or [pass_.name for pass_ in program.passes]
    if only is not None and only not in names:
        raise ProgramError(f"there is no pass {only!r}; the passes are {', '.join(names)}")
    if not texts:
        if only is not None:
            raise ProgramError("a Program holds no graphs; give the ONNX model to see the graph after a pass")
        yield "A Program holds no graphs; give the ONNX model to see them."
    before = None
    for name, text in texts.items():
        if only in (None, name):
            yield ""
            yield f"After {name}:" if text != before or only else f"After {name}: unchanged"
            if text != before or only:
                yield text.rstrip()
        before = text


def disassembly(program: Program, layer: str | None = None) -> Iterator[str]:
    """Yield a line for every instruction, in the order of the program.

    layer: show this layer only. ProgramError where there is none of that name.
    """
    layer_name = None if layer is None else _find_layer(program, layer).name
    for number, launch in enumerate(program.launches):
        yield f"launch {number}: {launch.count} instructions at {launch.address:#x}"
        last_owner = -1
        lines = disassemble(program.config, program.instructions(launch))
        for line, owner in zip(lines, launch.layer_of):
            info = launch.layers[owner]
            if layer_name is not None and info.name != layer_name:
                continue
            if owner != last_owner:
                yield f"; {info.name} ({info.op}: {', '.join(info.nodes)})"
                last_owner = owner
            yield line


def layer_loops(program: Program, layer: str) -> Iterator[str]:
    """Yield the loops of a layer and the decisions of their schedule. ProgramError where no layer is called `layer`."""
    info = _find_layer(program, layer)
    for number, part in enumerate(info.parts):
        part_text = f", part {number + 1} of {len(info.parts)}" if len(info.parts) > 1 else ""
        decided = ", ".join(f"{name} {value}" for name, value in part.decisions.items())
        yield f"# {info.name} ({info.op}{part_text}): {part.workload}"
        yield f"# {decided}"
        yield str(program.loops[part.loops])


def _find_layer(program: Program, name: str) -> LayerInfo:
    """Return the layer called `name`, or the one with the operator of that name. ProgramError where there is none."""
    infos = [info for launch in program.launches for info in launch.layers]
    matching = [info for info in infos if info.name == name] or [info for info in infos if name in info.nodes]
    if not matching:
        raise ProgramError(f"there is no layer {name!r}; the layers are {', '.join(i.name for i in infos) or 'none'}")
    return matching[0]
