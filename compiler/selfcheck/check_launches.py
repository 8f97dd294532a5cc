"""The first check: run the launches on the functional simulator and compare each layer's bytes with the CPU's.

Every byte of every layer is compared. The expected bytes of a layer are computed from the graph's operators that it
stands for, on the bytes that the simulated memory holds for their operands. So a wrong layer does not make those after
it wrong. Tensors are held as codes (operator_results.py): uint8 in the order of the values.

In the simulator (TappedDevice) each layer reads random bytes, whatever the layers before it stored. So values do not
degenerate to noise after many layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.launches import LaunchPlan
from celosia.compiler.graph.select import LayerAssignment, Partition
from celosia.compiler.graph.values import attribute, constant, shape
from celosia.compiler.layer import Activation, Storage, StridedView, whole_groups
from celosia.compiler.program import LaunchStep, Pack, Program
from celosia.compiler.program.model import FormInfo, matrix_counts, pack_activation, unpack_activation
from celosia.compiler.selfcheck.operator_results import CachedResults, Codes, codes, compute, is_concat, read_by
from celosia.compiler.selfcheck.shared_kernels import compiled_gemm
from celosia.compiler.target import compiling_for
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode
from celosia.sim.device import DeviceError
from celosia.sim.functional.decode import Instruction
from celosia.sim.functional.fsim import FunctionalDevice

Bytes = NDArray[np.uint8]
AXES = ("image", "channel", "row", "column")
"""Names of the axes of activations, for messages."""


class SelfCheckError(RuntimeError):
    """A compiled model that computes something else than its graph: a fault of Celosia. `layer`: name of the layer."""

    def __init__(self, layer: str, difference: str) -> None:
        super().__init__(f"layer {layer!r} {difference}")
        self.layer = layer


class CheckFailed(RuntimeError):
    """An error inside the check itself, which says nothing about the Program. `program`: the Program, which is not
    checked.
    """

    def __init__(self, cause: Exception) -> None:
        lines = f"{type(cause).__name__}: {cause}".splitlines()
        super().__init__(f"the check of the compiled model failed itself ({lines[0]}), so the Program is not checked")
        self.program: Program | None = None


@dataclass(frozen=True)
class Checked:
    """Result of the check: numbers of compared layers and bytes.

    held: the random codes that the accelerator's memory held of each tensor, by name. computed: results of operators on
    the CPU. The second check uses both again.
    """

    layers: int = 0
    bytes: int = 0
    held: Mapping[str, Codes] = field(default_factory=dict, compare=False)
    computed: CachedResults = field(default_factory=CachedResults, compare=False)


def self_check(
    program: Program, plans: list[LaunchPlan], selection: Partition, addresses: Mapping[Storage, int], seed: int = 0
) -> Checked:
    """Run the launches of `program` on random inputs and compare what each layer stores.

    plans: what the launches were made from. selection: the placement of operators. addresses: of storages in DRAM.
    seed: of the random inputs. SelfCheckError for the first layer that differs.
    """
    if not plans:
        return Checked()
    with compiling_for(None):  # it runs here, whatever the program is for
        return _Check(program, selection, addresses, seed).run(plans)


class _Check:
    """State of one check: the codes of all tensors so far, and the memory of the simulated accelerator."""

    def __init__(self, program: Program, selection: Partition, addresses: Mapping[Storage, int], seed: int) -> None:
        self.program, self.cfg, self.selection, self.addresses = program, program.config, selection, addresses
        self.rng = np.random.default_rng(seed)
        self.values: dict[ir.Value, Codes] = {}
        """Codes that the accelerator's memory holds of each tensor, in the tensor's shape."""
        self.places: dict[Storage, Place] = {}
        self.parts: dict[tuple[ir.Node, int], Codes] = {}
        """Codes of each part of a concatenation."""
        self.computed = CachedResults()

    def run(self, plans: list[LaunchPlan]) -> Checked:
        """Run all launches, with random bytes in unused memory, and count the compared layers and bytes."""
        program = self.program
        device = TappedDevice(self.cfg, self.rng)
        device.allocate(program.dram_size)
        device.write(0, random_bytes(self.rng, program.image_address))  # unused bytes must not matter
        device.write(program.image_address, program.image)
        layers = total = 0
        for plan, step in zip(plans, program.launches, strict=True):
            total += self._check_launch(device, plan, step)
            layers += len(plan.choices)
        held = {value.name or "": codes for value, codes in self.values.items()}
        return Checked(layers, total, held, self.computed)

    def _check_launch(self, device: TappedDevice, plan: LaunchPlan, step: LaunchStep) -> int:
        """Run one launch and compare its layers, in order. Returns the number of compared bytes. Raises
        SelfCheckError.
        """
        values_read = {storage: value for choice in plan.choices for storage, (value, _) in choice.reads.items()}
        for value, pack in zip(values_read.values(), step.pack, strict=True):
            self._write_input(device, value, pack)
        places = [self._place_of(choice) for choice in plan.choices]
        failure: DeviceError | None = None
        try:
            device.launch(step, places)
        except DeviceError as error:
            failure = error
            if device.failed_layer is not None:
                raise SelfCheckError(plan.choices[device.failed_layer].layer.name, _describe_error(error)) from None
        total = 0
        for choice, place in zip(plan.choices, places, strict=True):
            stored_codes = self._stored_codes(choice, place)
            difference = _difference(self._expected_codes(choice), stored_codes, choice.value)
            softmax = choice.layer.softmax
            if softmax is not None and (self._spare_channels(choice, place.stored) != softmax.zero_point).any():
                difference = (
                    difference or "gives channels beyond its last other than the zero point, on which products rely"
                )
            if difference:
                raise SelfCheckError(choice.layer.name, difference if failure is None else _describe_error(failure))
            self._keep_fresh_codes(choice, self._read_activation(place.fresh, choice.layer.y))
            total += stored_codes.size
        for value, unpack in zip(plan.unpacked, step.unpack, strict=True):
            activation = Activation(unpack.value, *unpack.form.dims, Storage("", unpack.groups), unpack.offset)
            unpacked = unpack.form.restore(
                self._read_activation(device.dram[unpack.address :], activation), shape(value) or ()
            )
            if not np.array_equal(unpacked, self._codes_of(value).reshape(unpacked.shape)):
                raise SelfCheckError(unpack.value, "is not where the host takes it from")
        return total

    # Memory ----------------------------------------------------------------------------------------------------

    def _write_input(self, device: TappedDevice, value: ir.Value, pack: Pack) -> None:
        """Write a tensor that the launch reads to device memory: a result of an earlier launch, a constant, or random
        bytes.
        """
        dims = shape(value)
        assert dims is not None
        if not self._is_known(value):
            fixed = constant(value)
            self.values[value] = self._random_codes(value, dims) if fixed is None else codes(fixed)
        stored = (self._codes_of(value) ^ np.uint8(0x80)).view(np.int8)
        device.write(pack.address, pack_activation(self.cfg, pack.form.arrange(stored), pack.groups))

    def _random_codes(self, value: ir.Value, dims: tuple[int, ...]) -> Codes:
        """Draw random codes of these dimensions for a tensor that the host packs, by `random_image`.

        A tensor that is no image counts as [images, channels] of one pixel, so that some of its channels saturate.
        """
        image = dims if len(dims) == 4 else (int(np.prod(dims[:1])), int(np.prod(dims[1:])), 1, 1)
        data = random_image(self.rng, (image[0], image[1], image[2], image[3]), zero_point(value))
        return data.view(np.uint8).reshape(dims) ^ np.uint8(0x80)

    def _place_of(self, choice: LayerAssignment) -> Place:
        """Return the memory of the layer's output, with fresh random bytes for later layers to read. Channels beyond
        the last one of a Softmax get the zero point, on which products rely.
        """
        y = choice.layer.y
        if y.storage not in self.places:
            size = y.size(self.cfg)
            stored, fresh = (random_bytes(self.rng, size) for _ in range(2))
            self.places[y.storage] = Place(self.addresses[y.storage], stored, fresh)
        place = self.places[y.storage]
        pixels = y.pixels.rows, y.pixels.columns
        tiles = place.fresh.view(np.int8).reshape(y.batches(self.cfg), y.storage_groups, *pixels, -1)
        part = tiles[:, *y.cut(self.cfg)]
        dims = part.shape[0], part.shape[1] * part.shape[4], y.height, y.width
        image = random_image(self.rng, dims, zero_point(choice.value))
        part[...] = image.reshape(*part.shape[:2], part.shape[4], *dims[2:]).transpose(0, 1, 3, 4, 2)
        if choice.layer.softmax is not None:
            self._spare_channels(choice, place.fresh)[...] = choice.layer.softmax.zero_point
        return place

    def _spare_channels(self, choice: LayerAssignment, memory: Codes) -> NDArray[np.int8]:
        """View the channels in `memory` beyond the last one of a Softmax, int8."""
        y = choice.layer.y
        pixels = y.pixels.rows, y.pixels.columns
        tiles = memory[: y.size(self.cfg)].view(np.int8).reshape(y.batches(self.cfg), y.storage_groups, *pixels, -1)
        last, first = divmod(choice.layer.x.channels, self.cfg.group)
        return tiles[:, *y.cut(self.cfg)][:, last:, ..., first:]

    def _stored_codes(self, choice: LayerAssignment, place: Place) -> Codes:
        """Return the codes that a layer stored. Padding channels get the value that the host's layout has there, since
        their content does not count.
        """
        stored_codes, form = self._read_activation(place.stored, choice.layer.y), self.selection.forms.get(choice.value)
        if form is None or not form.fold or form.dims != choice.layer.y.dims:
            return stored_codes
        info = self._form_of(choice.value)
        return info.arrange(info.restore(stored_codes, shape(choice.value) or ()))

    def _read_activation(self, memory: Codes, act: Activation) -> Codes:
        """Read the codes of `act` [images, channels, rows, columns] from `memory`, which begins with its storage."""
        data = memory[: act.size(self.cfg)]
        images = act.images, act.channels, act.pixels.rows, act.pixels.columns
        array = unpack_activation(self.cfg, data, images, act.storage_groups, act.group_offset)
        array = np.ascontiguousarray(array[:, :, *act.cut(self.cfg)[1:]])
        return array.view(np.uint8) ^ np.uint8(0x80)

    # Tensors ---------------------------------------------------------------------------------------------------

    def _form_of(self, value: ir.Value) -> FormInfo:
        """Return the layout in which layers write `value`, with 0 in padding channels, as they do not count."""
        return replace(self.selection.forms[value].info, pad=0)

    def _is_known(self, value: ir.Value) -> bool:
        """Return whether the codes of `value` are held, or follow from held ones by views and concatenations."""
        if value in self.values or constant(value) is not None:
            return True
        producer = value.producer()
        if producer in self.selection.views:
            return all(self._is_known(x) for x in read_by(producer))
        return (producer, 0) in self.parts

    def _codes_of(self, value: ir.Value) -> Codes:
        """Return the codes of `value`; those of views and concatenations are computed from their operands."""
        if value in self.values:
            return self.values[value]
        if (array := constant(value)) is not None:
            return codes(array)
        producer, dims = value.producer(), shape(value)
        assert producer is not None and dims is not None
        if is_concat(producer):
            parts = [self._operand_codes(producer, number) for number in range(len(read_by(producer)))]
            self.values[value] = np.concatenate(parts, axis=attribute(producer, "axis", 1)).reshape(dims)
        else:
            read = [self._codes_of(x) for x in read_by(producer)]
            self.values[value] = compute(producer, read, output=producer.outputs.index(value)).reshape(dims)
        return self.values[value]

    def _operand_codes(self, node: ir.Node, number: int) -> Codes:
        """Return the codes of operand `number` of the concatenation `node`, in the operand's shape."""
        value = read_by(node)[number]
        dims = shape(value)
        assert dims is not None
        part = self.parts.get((node, number))
        return self._codes_of(value) if part is None else self._form_of_part(node, part).restore(part, dims)

    def _form_of_part(self, node: ir.Node, part: Codes) -> FormInfo:
        """Return the layout of an operand of the concatenation `node`, held as `part` [images, channels, rows,
        columns].
        """
        return replace(self.selection.forms[node.outputs[0]].info, dims=part.shape)

    def _keep_fresh_codes(self, choice: LayerAssignment, data: Codes) -> None:
        """Hold the fresh codes that replaced the layer's output, for layers that read it. The layer may have written a
        region of its tensor, or a part of a concatenation.
        """
        node, dims = choice.nodes[-1], shape(choice.value)
        assert dims is not None
        if is_concat(node):
            number, first, channels = self._concat_part(choice, node)
            images, _, *pixels = data.shape
            part = self.parts.setdefault((node, number), np.zeros((images, channels, *pixels), np.uint8))
            part[:, first : first + data.shape[1]] = data
        if is_concat(node) and choice.value is node.outputs[0]:
            return
        destination, form = self.selection.written[choice.value], self._form_of(choice.value)
        if destination.dims == choice.layer.y.dims:
            self.values[choice.value] = form.restore(data, dims)
        else:
            arranged = form.arrange(self.values.setdefault(choice.value, np.zeros(dims, np.uint8)))
            arranged[self._written_region(choice)] = data
            self.values[choice.value] = form.restore(arranged, dims)

    def _written_region(self, choice: LayerAssignment) -> tuple[slice, ...]:
        """Return the region of its tensor that the layer writes: images, channels, rows, columns."""
        destination, y = self.selection.written[choice.value], choice.layer.y
        outer, inner = destination.pixels, y.pixels
        first = (y.group_offset - destination.group_offset) * self.cfg.group
        view = StridedView(
            destination.height, destination.width,
            (inner.top - outer.top) // outer.down, (inner.left - outer.left) // outer.across,
            inner.down // outer.down, inner.across // outer.across,
        )  # fmt: skip
        rows, columns = view.cut(y.height, y.width)
        return slice(None), slice(first, first + y.channels), rows, columns

    def _concat_part(self, choice: LayerAssignment, node: ir.Node) -> tuple[int, int, int]:
        """Find the operand of the concatenation `node` that the layer writes. Returns (operand, first channel, channels
        of the operand). SelfCheckError where it writes none.
        """
        destination, y = self.selection.written[node.outputs[0]], choice.layer.y
        axis, start = attribute(node, "axis", 1), 0
        if (columns := self._matrix_part(choice, node)) is not None:
            return columns
        for position, value in enumerate(read_by(node)):
            dims = shape(value)
            assert dims is not None
            is_image = not self.selection.forms[node.outputs[0]].fold  # else its rows are the pixels of one image row
            joins_channels = is_image and axis % len(dims) == 1
            channels, pixel = (start, 0) if joins_channels else (0, start)
            row, column = (pixel, 0) if is_image and len(dims) == 4 and axis % 4 == 2 else (0, pixel)
            strided_view = StridedView(destination.height, destination.width, row, column)
            if destination.region(y.dims, channels // self.cfg.group, strided_view) == y and prod(dims) == prod(y.dims):
                return position, 0, y.channels
            start += whole_groups(self.cfg, dims[axis]) if joins_channels else dims[axis]
        raise SelfCheckError(choice.layer.name, f"writes no part of {node.name!r}")

    def _matrix_part(self, choice: LayerAssignment, node: ir.Node) -> tuple[int, int, int] | None:
        """Do so where the operands are columns or rows of matrices; None where they are not."""
        value, y = node.outputs[0], choice.layer.y
        destination, fold, dims = self.selection.written[value], self.selection.forms[value].fold, shape(value) or ()
        axis = {"rows": -1, "columns": -2}.get(fold, 0)
        if not axis or attribute(node, "axis", 1) % len(dims) != len(dims) + axis:
            return None
        count = matrix_counts(fold, dims)[0]
        matrix, first = divmod(
            y.group_offset - destination.group_offset, destination.channels // count // self.cfg.group
        )
        if destination.region(y.dims, y.group_offset - destination.group_offset, destination.pixels) != y:
            return None
        for position, value_read in enumerate(read_by(node)):
            size = (shape(value_read) or ())[axis]
            if (first, y.channels) == (0, size):
                return position, matrix * size, count * size
            first -= size // self.cfg.group
        return None

    # Comparison ------------------------------------------------------------------------------------------------

    def _expected_codes(self, choice: LayerAssignment) -> Codes:
        """Compute the layer's operators one after the other on the held codes. Returns the codes that the layer must
        store, [images, channels, rows, columns].
        """
        results: dict[ir.Value, Codes] = {}
        result = None
        for node in choice.nodes:
            part = self._concat_part(choice, node)[0] if is_concat(node) else None
            read = read_by(node) if part is None else read_by(node)[part : part + 1]
            result = self.computed.compute(node, [self._operand(value, results) for value in read], part)
            results[node.outputs[0]] = result
        assert result is not None
        y = choice.layer.y
        if is_concat(node):
            _, first, channels = self._concat_part(choice, node)
            dims = y.images, channels, *y.dims[2:]
            return replace(self._form_of(choice.value), dims=dims).arrange(result)[:, first : first + y.channels]
        arranged = self._form_of(choice.value).arrange(result)
        return (
            arranged if self.selection.written[choice.value].dims == y.dims else arranged[self._written_region(choice)]
        )

    def _operand(self, value: ir.Value | None, computed: dict[ir.Value, Codes]) -> Codes:
        """Return the codes of an operand: computed by the layer's earlier operators, or held in memory."""
        assert value is not None
        return computed[value] if value in computed else self._codes_of(value)


def _difference(expected: Codes, actual: Codes, value: ir.Value) -> str:
    """Describe how the stored codes of a layer differ from the expected ones; "" where they are equal."""
    if np.array_equal(expected, actual):
        return ""
    differing = np.argwhere(expected != actual)
    first = tuple(int(index) for index in differing[0])
    position = ", ".join(f"{axis} {index}" for axis, index in zip(AXES, first))
    low = 128 if value.dtype == ir.DataType.INT8 else 0
    return (
        f"gives {len(differing)} of {actual.size} bytes other than its operators on the CPU, the first at {position}: "
        f"expected {int(expected[first]) - low}, found {int(actual[first]) - low}"
    )


def _describe_error(error: DeviceError) -> str:
    """Describe an error that ended a launch, as part of a SelfCheckError."""
    return f"ends in an error: {error}"


def zero_point(value: ir.Value) -> int:
    """Return the zero point with which an operator reads `value`, as int8; 0 where there is none."""
    for use in value.uses():
        inputs = use.node.inputs
        zero = constant(inputs[use.idx + 2]) if use.idx + 2 < len(inputs) else None
        if zero is not None and zero.size == 1 and zero.dtype in (np.int8, np.uint8):
            return int(zero.item()) - (128 if zero.dtype == np.uint8 else 0)
    return 0


# The simulator ---------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The memory of one storage in DRAM, which begins at `address`: the bytes that layers stored, and the random bytes
    that replace them for later readers (`fresh`).
    """

    address: int
    stored: Bytes
    fresh: Bytes


class TappedDevice(FunctionalDevice):
    """Run a launch in which each layer reads random bytes, and hand over what it stores.

    After each STORE, the written bytes are moved to `stored` of the layer's place, and those of `fresh` replace them in
    memory before anything can read them.
    """

    def __init__(self, config: Config, rng: np.random.Generator) -> None:
        """Fill the scratchpads with random bytes, as their old contents must not matter."""
        super().__init__(config)
        for buffer in vars(self.state).values():
            if isinstance(buffer, np.ndarray):
                buffer.reshape(-1).view(np.uint8)[...] = random_bytes(rng, buffer.nbytes)
        self.products = compiled_gemm(self.state)
        """Compiled GEMM, where the Config and processor allow one."""
        self.layer_of: list[int] = []
        self.places: list[Place] = []
        self.failed_layer: int | None = None
        """The layer whose instruction ended a launch in an error."""

    def launch(self, step: LaunchStep, places: list[Place]) -> None:
        """Run `step`. places: where each of its layers stores. Raises DeviceError."""
        self.layer_of, self.places = step.layer_of.tolist(), places
        self.run(step.address, step.count)

    def execute(self, instruction: Instruction, number: int = 0) -> None:
        """Execute instruction `number` of the launch, and replace what a STORE wrote."""
        self.failed_layer = self.layer_of[number]
        if instruction.opcode == Opcode.GEMM and self.products is not None:
            self.products(instruction)
        else:
            super().execute(instruction, number)
        if instruction.opcode == Opcode.STORE:
            self._replace_stored(instruction.fields, number, self.places[self.layer_of[number]])
        self.failed_layer = None

    def _replace_stored(self, fields: dict[str, int], number: int, place: Place) -> None:
        """Move the bytes that a STORE wrote to `place.stored`, and put the fresh bytes in memory. DeviceError where the
        STORE wrote outside of the place.
        """
        dims = fields["z_size"], fields["y_size"], fields["x_size"] * self.config.piece_bytes
        strides = [_signed(fields[name]) if size > 1 else 0 for name, size in zip(("dram_z", "dram_y"), dims)]
        start = fields["dram_addr"] - place.address
        ends = [(size - 1) * stride for size, stride in zip(dims, strides)]
        first, last = start + sum(min(end, 0) for end in ends), start + sum(max(end, 0) for end in ends) + dims[2]
        if first < 0 or last > len(place.stored):
            raise DeviceError(f"instruction {number}: STORE writes outside of the layer's output")

        def view_rows(memory: Bytes, start: int) -> Bytes:
            """View the planes, rows and bytes of the STORE in `memory`."""
            return np.ndarray(dims, np.uint8, memory, start, (*strides, 1))

        written = view_rows(self.dram, fields["dram_addr"])
        view_rows(place.stored, start)[...] = written
        written[...] = view_rows(place.fresh, start)


def _signed(value: int) -> int:
    """Convert a stride modulo 2^32 to a signed number."""
    return (value ^ 1 << 31) - (1 << 31)


def random_bytes(rng: np.random.Generator, count: int) -> Bytes:
    """Draw bytes of the complete range, one in eight of them the lowest or the highest int8.

    Faults of saturation show at these.
    """
    data = np.frombuffer(rng.bytes(count), np.uint8).copy()
    data[::17] = 0x80
    data[5::15] = 0x7F
    return data


def random_image(rng: np.random.Generator, dims: tuple[int, int, int, int], zero: int) -> NDArray[np.int8]:
    """Draw int8 [images, channels, rows, columns]: of the complete range in the upper half, near `zero` in the lower
    half.

    Sums of many bytes of the complete range saturate the output in some channels, whatever the weights; sums of small
    ones do not. A single row is halved; with a single pixel, every other byte is small.
    """
    values = random_bytes(rng, int(np.prod(dims))).view(np.int8).reshape(dims)
    rows, columns = dims[2:]
    if rows * columns == 1:
        lower = values[:, 1::2]
    else:
        lower = values[:, :, rows // 2 :] if rows > 1 else values[..., columns // 2 :]
    lower[...] = np.clip((lower >> 3) + np.int16(zero), -128, 127)  # at most 16 from the zero point
    return values
