"""The check of a compiled model: launches run on the functional simulator, each layer's bytes against the CPU's.

Every byte of every layer is compared. A layer is computed from the operators of the graph that it stands for, on the
bytes that the simulated accelerator has in its memory for them: a wrong layer does not make those after it wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from celosia.compiler.cpu.target import compiling_for
from celosia.compiler.graph.launches import LaunchPlan
from celosia.compiler.graph.select import Choice, Selection
from celosia.compiler.graph.values import constant, shape
from celosia.compiler.layer import Activation, Storage
from celosia.compiler.program import LaunchStep, Pack, Program
from celosia.compiler.selfcheck.device import TappedDevice, random_bytes
from celosia.compiler.selfcheck.operators import Codes, compute
from celosia.compiler.tensorize.pack import activation, unpack_activation
from celosia.sim.device import DeviceError

AXES = ("image", "channel", "row", "column")


class SelfCheckError(RuntimeError):
    """A compiled model that computes something else than its graph: a fault of Celosia. `layer` is its name."""

    def __init__(self, layer: str, what: str) -> None:
        super().__init__(f"layer {layer!r} {what}")
        self.layer = layer


@dataclass(frozen=True)
class Checked:
    """How many layers and bytes were compared."""

    layers: int = 0
    bytes: int = 0


def self_check(
    program: Program, plans: list[LaunchPlan], selection: Selection, addresses: Mapping[Storage, int], seed: int = 0
) -> Checked:
    """Run the launches of `program` on random inputs and compare. SelfCheckError for the first layer that differs.

    plans: what the launches of `program` were made from. addresses: of storages in DRAM.
    """
    if not plans:
        return Checked()
    with compiling_for(None):  # it runs here, whatever the program is for
        return _Check(program, selection, addresses, seed).run(plans)


class _Check:
    def __init__(self, program: Program, selection: Selection, addresses: Mapping[Storage, int], seed: int) -> None:
        self.program, self.cfg, self.selection, self.addresses = program, program.config, selection, addresses
        self.rng = np.random.default_rng(seed)
        self.values: dict[ir.Value, Codes] = {}
        """What the accelerator's memory holds of each tensor, in the tensor's shape."""
        self.parts: dict[tuple[ir.Node, int], Codes] = {}
        """The same of each part of a concatenation."""

    def run(self, plans: list[LaunchPlan]) -> Checked:
        program = self.program
        device = TappedDevice(self.cfg, program.image_address, self.rng)
        device.allocate(program.dram_size)
        device.write(0, random_bytes(self.rng, program.image_address))  # what no channel uses must not matter
        device.write(program.image_address, program.image)
        layers = total = 0
        for plan, step in zip(plans, program.launches, strict=True):
            total += self._launch(device, plan, step)
            layers += len(plan.choices)
        return Checked(layers, total)

    def _launch(self, device: TappedDevice, plan: LaunchPlan, step: LaunchStep) -> int:
        """Run one launch and compare its layers, in their order. Returns the number of bytes."""
        given = {storage: value for choice in plan.choices for storage, (value, _) in choice.reads.items()}
        for value, pack in zip(given.values(), step.pack, strict=True):
            self._fill(device, value, pack)
        results: dict[int, tuple[Codes, Codes]] = {}

        def finished(layer: int) -> None:
            y = plan.choices[layer].layer.y
            results[layer] = self._codes(device.stored, y), self._codes(device.dram, y)

        failure: DeviceError | None = None
        try:
            device.launch(step, finished)
        except DeviceError as error:
            failure = error
        for number, choice in enumerate(plan.choices):
            if failure is not None and (number not in results or device.failed_layer == number):
                raise SelfCheckError(choice.layer.name, f"ends in an error: {failure}") from None
            if number not in results:
                raise SelfCheckError(choice.layer.name, "never stores its output")
            found, fresh = results[number]
            self._compare(choice, self._expected(choice), found)
            self._keep(choice, fresh)
        for value, unpack in zip(plan.taken, step.unpack, strict=True):
            held = Activation(unpack.value, *unpack.dims, Storage("", unpack.groups), unpack.offset)
            if not np.array_equal(self._at(device.dram, held, unpack.address).ravel(), self._value(value).ravel()):
                raise SelfCheckError(unpack.value, "is not where the host takes it from")
        return sum(found.size for found, _ in results.values())

    # Memory ----------------------------------------------------------------------------------------------------

    def _fill(self, device: TappedDevice, value: ir.Value, pack: Pack) -> None:
        """Give the accelerator random bytes for a tensor of the host, or those of a layer of an earlier launch."""
        dims = shape(value)
        assert dims is not None
        if not self._is_known(value):
            self.values[value] = random_bytes(self.rng, int(np.prod(dims))).reshape(dims)
        stored = (self._value(value) ^ np.uint8(0x80)).view(np.int8)
        device.write(pack.address, activation(self.cfg, pack.form.arrange(stored), pack.groups))

    def _codes(self, memory: Codes, act: Activation) -> Codes:
        return self._at(memory, act, self.addresses[act.storage])

    def _at(self, memory: Codes, act: Activation, address: int) -> Codes:
        """The codes of `act`, [images, channels, rows, columns], from memory at `address`."""
        data = memory[address : address + act.size(self.cfg)]
        array = unpack_activation(self.cfg, data, act.dims, act.storage_groups, act.group_offset)
        return array.view(np.uint8) ^ np.uint8(0x80)

    # Tensors ---------------------------------------------------------------------------------------------------

    def _is_known(self, value: ir.Value) -> bool:
        if value in self.values:
            return True
        producer = value.producer()
        if producer in self.selection.views:
            return producer.inputs[0] is not None and self._is_known(producer.inputs[0])
        return (producer, 0) in self.parts

    def _value(self, value: ir.Value) -> Codes:
        """What the accelerator holds of `value`."""
        if value in self.values:
            return self.values[value]
        producer, dims = value.producer(), shape(value)
        assert producer is not None and dims is not None
        if producer in self.selection.views:
            assert producer.inputs[0] is not None
            return self._value(producer.inputs[0]).reshape(dims)
        parts = [self.parts[producer, number] for number in range(_part_count(producer))]
        self.values[value] = np.concatenate(parts, axis=1).reshape(dims)
        return self.values[value]

    def _keep(self, choice: Choice, data: Codes) -> None:
        """Note what the accelerator holds of the output of `choice`."""
        node, dims = choice.nodes[-1], shape(choice.value)
        assert dims is not None
        if node.op_type == "QLinearConcat":
            self.parts[node, self._part(choice, node)] = data
        if node.op_type != "QLinearConcat" or choice.value is not node.outputs[0]:
            self.values[choice.value] = data.reshape(dims)

    def _part(self, choice: Choice, node: ir.Node) -> int:
        """The part of the concatenation `node` that `choice` writes."""
        start = self.selection.written[node.outputs[0]].group_offset
        for number in range(_part_count(node)):
            if start == choice.layer.y.group_offset:
                return number
            value = node.inputs[2 + 3 * number]
            dims = None if value is None else shape(value)
            assert dims is not None
            start += dims[1] // self.cfg.group
        raise SelfCheckError(choice.layer.name, f"writes no part of {node.name!r}")

    # Comparison ------------------------------------------------------------------------------------------------

    def _expected(self, choice: Choice) -> Codes:
        """The output of the operators of `choice`, one after the other."""
        made: dict[ir.Value, Codes] = {}
        result = None
        for node in choice.nodes:
            if node.op_type == "QLinearConcat":
                number = self._part(choice, node)
                read = [node.inputs[2 + 3 * number]]
                result = compute(node, [self._operand(value, made) for value in read], number)
            else:
                read = [value for value in node.inputs if value is not None and constant(value) is None]
                result = compute(node, [self._operand(value, made) for value in read])
            made[node.outputs[0]] = result
        assert result is not None
        return result.reshape(choice.layer.y.dims)

    def _operand(self, value: ir.Value | None, made: dict[ir.Value, Codes]) -> Codes:
        assert value is not None
        return made[value] if value in made else self._value(value)

    def _compare(self, choice: Choice, expected: Codes, found: Codes) -> None:
        if np.array_equal(expected, found):
            return
        wrong = np.argwhere(expected != found)
        first = tuple(int(index) for index in wrong[0])
        place = ", ".join(f"{axis} {index}" for axis, index in zip(AXES, first))
        low = 128 if choice.value.dtype == ir.DataType.INT8 else 0
        raise SelfCheckError(
            choice.layer.name,
            f"gives {len(wrong)} of {found.size} bytes other than its operators on the CPU, the first at {place}: "
            f"expected {int(expected[first]) - low}, found {int(found[first]) - low}",
        )


def _part_count(node: ir.Node) -> int:
    return (len(node.inputs) - 2) // 3
