"""Build random layers, compute their meaning in plain numpy, and run their compiled image on the functional
simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.launch.image import Image, build
from celosia.compiler.layer import (
    Activation,
    ActivationGemm,
    Epilogue,
    Gemm,
    Layer,
    Multiplication,
    Norm,
    Requantise,
    Residual,
    Softmax,
    Storage,
    Window,
    padded_groups,
)
from celosia.compiler.program.model import pack_activation, unpack_activation
from celosia.compiler.tensorize.pack import codebooks_of_multiples
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.space import Tiling, Workload, candidates
from celosia.compiler.vthread.verify import Run, verify_provenance
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.hw.spec.pipeline import NORM_FRACTION
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.functional.norm import normalise_rows

Int8 = NDArray[np.int8]
Draw = Callable[[st.SearchStrategy[int]], int]

_SMALL = dict(inp_depth=128, wgt_depth=64, acc_depth=64, vin_depth=64, out_depth=64, par_depth=8)
CONFIGS = {
    "tiny": PRESETS["tiny"],
    "pynq": PRESETS["pynq"],
    "small-buffers": Config(**_SMALL),
    "4x4-tight": Config(block_in=4, block_out=4, queue_depth=4, **(_SMALL | {"inp_depth": 64, "out_depth": 32})),
    "4x4-tokens2": Config(block_in=4, block_out=4, token_bits=2, queue_depth=2, **_SMALL),
    "batch2": Config(batch=2, block_in=4, block_out=4, **_SMALL),
    "4x8": Config(block_in=4, block_out=8, bus_bytes=16, **_SMALL),
    "16x4": Config(block_in=16, block_out=4, **_SMALL),
    "batch2-4x8": Config(batch=2, block_in=4, block_out=8, **_SMALL),
    "batch2-8x4": Config(batch=2, block_in=8, block_out=4, bus_bytes=4, **_SMALL),
    "softmax": Config(block_in=4, block_out=4, softmax=1, **_SMALL),
    "packed-4x8": Config(block_in=4, block_out=8, weight_bits=4, **_SMALL),
    "packed-16x4": Config(block_in=16, block_out=4, bus_bytes=4, weight_bits=2, ports=2, **_SMALL),
    "packed-32x8": Config(block_in=32, block_out=8, weight_bits=4, forward=True, taps=3, tap_depth=32, **_SMALL),
    "packed-8x8": Config(block_in=8, block_out=8, weight_bits=1, **_SMALL),
    "norm": Config(block_in=4, block_out=4, norm=2, **_SMALL),
    "norm-4x8": Config(block_in=4, block_out=8, bus_bytes=16, norm=8, **_SMALL),
    "softmax-4x8": Config(block_in=4, block_out=8, bus_bytes=16, softmax=2, **_SMALL),
    "softmax-8x4": Config(block_in=8, block_out=4, softmax=1, **_SMALL),
}


# Meaning --------------------------------------------------------------------------------------------------


def _windows(x: Int8, w: Window, pad_value: int) -> NDArray[np.int64]:
    """Return the windows of `x` as [images, channels, rows, columns, kernel rows, kernel columns]."""
    top, left, bottom, right = w.pads
    x = np.pad(x.astype(np.int64), ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=pad_value)
    view = np.lib.stride_tricks.sliding_window_view(x, (w.reach(0), w.reach(1)), axis=(2, 3))
    return view[:, :, :: w.strides[0], :: w.strides[1], :: w.dilations[0], :: w.dilations[1]]


def _requantised(total: NDArray[np.int64], r: Requantise, clip: tuple[int, int]) -> NDArray[np.int64]:
    """Return the int8 values of int32 sums [images, channels, height, width] after bias, scale, zero point and clip."""
    bias, multiplier, shift = (v[None, :, None, None] for v in (r.bias, r.multiplier, r.shift))
    return numerics.requantize(total.astype(np.int32), bias, multiplier, shift, r.zero_point, *clip).astype(np.int64)


def meaning(layer: Layer, values: dict[Activation, Int8]) -> Int8:
    """Return the output of `layer`, [images, channels, height, width].

    values: the tensors that the layer reads, by activation.
    """
    if layer.is_block:
        inside = dict(values)
        for inner in layer.layers:
            inside[inner.y] = meaning(inner, inside)
        return inside[layer.y]
    x, epilogue = values[layer.x], layer.epilogue
    v = x.astype(np.int64)
    if layer.gemm is not None:
        v = _convolution(layer, layer.gemm, x)
        if layer.gemm.sum_bytes:
            little = np.ascontiguousarray(v.astype("<i4")).view(np.int8).reshape(*v.shape, 4)
            return np.concatenate([little[..., byte] for byte in range(layer.gemm.sum_bytes)], axis=1)
    elif layer.product is not None:
        heads = zip(np.split(x[0, :, 0], layer.heads), np.split(values[layer.product.w][0, :, 0], layer.heads))
        v = np.concatenate([_product(layer, layer.product, *head) for head in heads], axis=1)
    elif layer.reduce:
        windows = _windows(x, layer.window, layer.pad_value)
        v = windows.max(axis=(4, 5)) if layer.reduce == "max" else windows.sum(axis=(4, 5))
    elif layer.multiply is not None:
        b = values[layer.multiply.b]
        v = (x.astype(np.int64) + layer.multiply.x_offset) * (b.astype(np.int64) + layer.multiply.b_offset)
    elif (norm := layer.norm) is not None:
        rows, count = x.transpose(0, 2, 3, 1), layer.x.channels
        v = normalise_rows(rows.reshape(-1, count), count, norm.offset, norm.centre, norm.epsilon)
        v = v.reshape(rows.shape).transpose(0, 3, 1, 2)
    elif layer.softmax is not None:
        v = np.concatenate([_softmax(head, layer.softmax) for head in np.split(x, layer.heads, axis=1)], axis=1)
    if layer.requantise is not None and layer.product is None:
        v = _requantised(v, layer.requantise, epilogue.clip)
    v = np.clip(v, *epilogue.clip)
    if epilogue.table is not None:
        v = epilogue.table[v + 128].astype(np.int64)
    if epilogue.residual is not None:
        r = epilogue.residual
        parameters = numerics.RescaleAdd(r.scale_v, r.scale_b, r.scale_c, r.shift, r.lo, r.hi)
        v = numerics.rescale_add(v, values[r.operand], parameters).astype(np.int64)
    return v.astype(np.int8)


def _convolution(layer: Layer, gemm: Gemm, x: Int8) -> NDArray[np.int64]:
    """Return the sums of a convolution, [images, channels, height, width], before requantisation."""
    windows = _windows(x, layer.window, layer.pad_value)
    group_in, group_out = gemm.weights.shape[1], gemm.weights.shape[0] // gemm.groups
    parts = [
        np.einsum(
            "nchwij,ocij->nohw",
            windows[:, g * group_in : (g + 1) * group_in],
            gemm.weights[g * group_out : (g + 1) * group_out].astype(np.int64),
            optimize=True,
        )
        for g in range(gemm.groups)
    ]
    return np.concatenate(parts, axis=1)


def _product(layer: Layer, product: ActivationGemm, x: Int8, w: Int8) -> NDArray[np.int64]:
    """Return the requantised product of one head, [1, columns, 1, pixels].

    x: [inner, pixels]. w: [inner, columns].
    """
    assert layer.requantise is not None
    columns = w[:, : layer.y.channels // layer.heads].astype(np.int64) + product.w_offset
    v = np.einsum("cm,cn->nm", x.astype(np.int64) + product.x_offset, columns)[None, :, None]
    return _requantised(v, layer.requantise, layer.epilogue.clip)


def _softmax(x: Int8, softmax: Softmax) -> NDArray[np.int64]:
    """Return the softmax of each pixel over its channels, as the hardware rounds it.

    Sums and quotients are computed in float64 and rounded to float32 after each operation. Rounding twice does not
    change the result of one float32 operation.
    """
    powers, shares = np.split(softmax.powers, 2)
    y = np.zeros(x.shape, np.int64)
    for image, row, column in np.ndindex(x.shape[0], *x.shape[2:]):
        elements = x[image, :, row, column].astype(int).tolist()
        places = [255 + element - max(elements) for element in elements]
        total = np.float32(0)
        for place in places:
            total = np.float32(float(total) + float(powers[place]))
        quotients = [np.float32(float(shares[place]) / float(total)) for place in places]
        y[image, :, row, column] = [round(float(quotient)) + softmax.zero_point for quotient in quotients]
    return y


# Running --------------------------------------------------------------------------------------------------


def code_of(cfg: Config, image: Image, launch: int = 0) -> NDArray[np.uint8]:
    """Return the instructions of one launch, [count, bytes]."""
    size, run = instruction_bytes(cfg), image.launches[launch]
    first = run.address - image.constants_address
    return image.constants[first : first + run.count * size].reshape(run.count, size)


@dataclass
class Network:
    """Layers in launches, with the activations that the host fills before the first launch."""

    cfg: Config
    launches: list[list[Layer]] = field(default_factory=lambda: [[]])
    host_inputs: dict[Activation, Int8] = field(default_factory=dict)

    @property
    def layers(self) -> list[Layer]:
        return [layer for launch in self.launches for layer in launch]

    def outputs(self) -> list[Activation]:
        """Return the activations whose storage no layer reads."""
        used = {act.storage for layer in self.layers for act in layer.inputs()}
        return [layer.y for layer in self.layers if layer.y.storage not in used]

    def borders(self) -> tuple[list[set[Storage]], list[set[Storage]]]:
        """Return the storages that the host fills before each launch, and those that it reads after each."""
        written = [set[Storage]() for _ in self.launches]
        read = [set[Storage]() for _ in self.launches]
        written[0] = {act.storage for act in self.host_inputs}
        read[-1] = {act.storage for act in self.outputs()}
        return written, read

    def build(self, planner: Planner | None = None, cold: bool = True) -> Image:
        return build(self.cfg, self.launches, *self.borders(), planner, cold)

    def verify(self, image: Image) -> None:
        """Raise VerifyError if `image` does not compute what the layers mean."""
        runs = [
            Run(code_of(self.cfg, image, number), self.launches[number], launch.layer_of, packed, taken)
            for number, (launch, packed, taken) in enumerate(zip(image.launches, *self.borders(), strict=True))
        ]
        verify_provenance(self.cfg, runs, image.addresses, image.constants_address, image.constants, image.size)

    def check(self, checking: bool = False, planner: Planner | None = None) -> Image:
        """Compile, verify and run the network; compare each output with its meaning.

        checking: let the functional simulator check accesses of scratchpads. Returns the image.
        """
        cfg, image = self.cfg, self.build(planner)
        device = FunctionalDevice(cfg, checking)
        device.allocate(image.size)
        noise = np.random.default_rng(0).integers(0, 256, image.constants_address, np.uint8)
        device.write(0, noise)  # bytes that no channel uses must not matter
        device.write(image.constants_address, image.constants)
        for act, values in self.host_inputs.items():
            self._fill(device, image, act, values)
        self.verify(image)
        for launch in image.launches:
            device.run(launch.address, launch.count)

        values = dict(self.host_inputs)
        for layer in self.layers:
            if layer.x not in values:  # a concatenation
                values |= _concatenated(self.layers, layer.x, values)
            values[layer.y] = meaning(layer, values)
        for act in self.outputs():
            data = device.read(image.addresses[act.storage], act.size(cfg))
            shape = (act.images, act.channels, act.height, act.width)
            output = unpack_activation(cfg, data, shape, act.storage_groups, act.group_offset)
            np.testing.assert_array_equal(output, values[act], f"{act.name} of {self.layers}")
        return image

    def _fill(self, device: FunctionalDevice, image: Image, act: Activation, values: Int8) -> None:
        """Write `values` into the channel groups of `act`, and leave the rest of its storage as it is."""
        cfg, address = self.cfg, image.addresses[act.storage]
        plane = act.height * act.width * cfg.piece_bytes
        data = pack_activation(cfg, values, act.groups(cfg)).reshape(act.batches(cfg), -1)
        for batch, row in enumerate(data):
            device.write(address + (batch * act.storage_groups + act.group_offset) * plane, row)


def _concatenated(layers: list[Layer], whole: Activation, values: dict[Activation, Int8]) -> dict[Activation, Int8]:
    """Return the values of a concatenation: the outputs of the layers that write its storage."""
    parts = sorted((layer.y for layer in layers if layer.y.storage is whole.storage), key=lambda act: act.group_offset)
    return {whole: np.concatenate([values[part] for part in parts], axis=1)}


# Drawing --------------------------------------------------------------------------------------------------


def requantise(rng: np.random.Generator, channels: int, reach: float) -> Requantise:
    """Draw scales that map sums of about `reach` to the range of int8."""
    scale = (rng.uniform(0.3, 2.0, channels) * 100 / max(reach, 1)).astype(np.float32)
    bias = rng.integers(-int(reach) // 2 - 1, int(reach) // 2 + 2, channels).astype(np.int32)
    return Requantise(bias, *numerics.scale_to_multiplier(scale), int(rng.integers(-30, 30)))


def few_bits(rng: np.random.Generator, shape: tuple[int, ...], bits: int) -> Int8:
    """Draw weights [outputs, inputs, ...] that have at most 2^bits values for each codebook.

    The values are a few integers times a factor for each output; matrices may have a factor for each 32 inputs of an
    output. In 40% of the calls all weights share 2^bits arbitrary values instead.
    """
    if rng.random() < 0.4:
        return rng.choice(rng.integers(-128, 128, 1 << bits).astype(np.int8), shape)
    matrix = shape[2:] == (1, 1) and rng.random() < 0.5
    factors = rng.integers(1, 17, (shape[0], -(-shape[1] // 32) if matrix else 1)).repeat(32 if matrix else shape[1], 1)
    return (
        rng.choice(codebooks_of_multiples(bits)[-1].view(np.int8), shape) * factors[:, : shape[1], None, None]
    ).astype(np.int8)


def table(rng: np.random.Generator) -> Int8:
    """Draw a table of 256 int8 values."""
    return rng.integers(-128, 128, 256).astype(np.int8)


def residual(rng: np.random.Generator, operand: Activation) -> Residual:
    """Draw the constants of a rescale-add of `operand`."""
    a, b = (int(v) for v in rng.integers(-(1 << 14), 1 << 14, 2))
    return Residual(operand, a, b, int(rng.integers(-(1 << 18), 1 << 18)), 14, -100 if rng.random() < 0.3 else -128)


@st.composite
def windows(draw: st.DrawFn, largest: int = 4) -> Window:
    """Draw a window. largest: the most rows and columns of its kernel."""

    def pair(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kernel = draw(st.sampled_from([(1, 1), (3, 3), None])) or pair(1, largest)
    strides = draw(st.sampled_from([(1, 1), (2, 2), None])) or pair(1, 3)
    dilations = draw(st.sampled_from([(1, 1), (1, 1), None])) or pair(1, 2)
    bare = Window(kernel, strides, dilations)
    pads = [draw(st.integers(0, bare.reach(axis) - 1)) for axis in (0, 1, 0, 1)]
    if draw(st.booleans()):
        pads = [0] * 4
    return Window(kernel, strides, dilations, (pads[0], pads[1], pads[2], pads[3]))


@dataclass
class Builder:
    """A network in the making; each method draws a layer, appends it and returns its output."""

    net: Network
    draw: st.DrawFn
    rng: np.random.Generator

    @property
    def cfg(self) -> Config:
        return self.net.cfg

    def _number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def _flag(self) -> bool:
        return self.draw(st.booleans())

    def _name(self) -> str:
        """Draw a name. Names are for messages: they may be empty or equal."""
        return self.draw(st.sampled_from([f"t{len(self.net.layers)}", "", "same"]))

    def host_input(
        self, images: int, channels: int, height: int, width: int, before: int = 0, after: int = 0
    ) -> Activation:
        """Add an activation that the host fills.

        Its storage has `before` and `after` other channel groups around it.
        """
        name = f"in{len(self.net.host_inputs)}"
        act = Activation.alone(self.cfg, name, images, channels, height, width)
        if before or after:
            groups = padded_groups(self.cfg, (before + after + act.groups(self.cfg)) * self.cfg.group)
            act = replace(act, storage=Storage(f"{name}-storage", groups), group_offset=before)
        values = self.rng.integers(-128, 128, (images, channels, height, width)).astype(np.int8)
        self.net.host_inputs[act] = values
        return act

    def _like(self, x: Activation) -> Activation:
        return self.host_input(x.images, x.channels, x.height, x.width)

    def epilogue(self, y: Activation, second: bool = True) -> Epilogue:
        """Draw clip, table and residual of a layer. second: allow a residual."""
        clip = (-128, 127)
        if self._flag():
            low, high = sorted(int(v) for v in self.rng.integers(-128, 128, 2))
            clip = (low, high)
        lookup = table(self.rng) if self._number(0, 2) == 0 else None
        add = residual(self.rng, self._like(y)) if second and self._number(0, 2) == 0 else None
        return Epilogue(clip, lookup, add)

    def _add(self, layer: Layer) -> Activation:
        self.net.launches[-1].append(layer)
        return layer.y

    def _output(self, x: Activation, channels: int, window: Window) -> Activation:
        top, left, bottom, right = window.pads
        height = (x.height + top + bottom - window.reach(0)) // window.strides[0] + 1
        width = (x.width + left + right - window.reach(1)) // window.strides[1] + 1
        return Activation.alone(self.cfg, self._name(), x.images, channels, height, width)

    def conv(
        self, x: Activation, window: Window, channels: int, groups: int = 1, y: Activation | None = None
    ) -> Activation:
        """Add a convolution of `x` to `channels` channels. y: the output, by default one with a storage of its own."""
        y = y or self._output(x, channels, window)
        shape = (channels, x.channels // groups, *window.kernel)
        weights = self.rng.integers(-128, 128, shape).astype(np.int8)
        if self.cfg.weight_bits < 8 and self._number(0, 3):
            weights = few_bits(self.rng, shape, self.cfg.weight_bits)
        reach = 74 * 74 * np.sqrt(np.prod(shape[1:]))
        return self._add(
            Layer(
                self._name(), x, y, window, gemm=Gemm(weights, groups),
                requantise=requantise(self.rng, channels, reach),
                pad_value=int(self.rng.integers(-128, 128)), epilogue=self.epilogue(y),
            )
        )  # fmt: skip

    def pool(self, x: Activation, window: Window, largest: bool) -> Activation:
        """Add a pooling: maxima if `largest`, else requantised sums."""
        y = self._output(x, x.channels, window)
        scale = None if largest else requantise(self.rng, x.channels, 74 * np.sqrt(np.prod(window.kernel)))
        pad_value = -128 if largest else int(self.rng.integers(-128, 128))
        epilogue, reduce = self.epilogue(y, second=False), "max" if largest else "sum"
        return self._add(
            Layer(self._name(), x, y, window, pad_value, reduce=reduce, requantise=scale, epilogue=epilogue)
        )

    def map(self, x: Activation, operand: Activation | None = None) -> Activation:
        """Add a layer of element-wise operations: clip, table, and the residual `operand` if one is passed."""
        y = self._output(x, x.channels, Window((1, 1)))
        epilogue = self.epilogue(y, second=False)
        if operand is not None:
            epilogue = Epilogue(epilogue.clip, epilogue.table, residual(self.rng, operand))
        return self._add(Layer(self._name(), x, y, epilogue=epilogue))

    def product(self, x: Activation, w: Activation, channels: int) -> Activation:
        """Add a product of two activations, whose result has `channels` channels. `w` has as many pixels."""
        y = Activation.alone(self.cfg, self._name(), 1, channels, 1, x.width)
        offsets = [self._number(-127, 128) if self._flag() else self.draw(st.sampled_from([0, 128])) for _ in range(2)]
        scale = requantise(self.rng, channels, 150 * 150 * np.sqrt(x.channels))
        product, epilogue = ActivationGemm(w, *offsets), self.epilogue(y)
        return self._add(Layer(self._name(), x, y, product=product, requantise=scale, epilogue=epilogue))

    def softmax(self, x: Activation) -> Activation:
        """Add a softmax over the channels of each pixel."""
        y = self._output(x, x.channels, Window((1, 1)))
        scale, steps = float(self.rng.uniform(0.01, 0.5)), float(self.rng.choice([1 / 255, 1 / 127, 0.02]))
        powers = numerics.softmax_powers(x.channels, scale, steps)
        clip = self.epilogue(y, second=False).clip
        softmax = Softmax(powers, int(self.rng.integers(-128, 128)))
        return self._add(Layer(self._name(), x, y, softmax=softmax, epilogue=Epilogue(clip)))

    def norm(self, x: Activation) -> Activation:
        """Add a normalisation over the channels of each pixel."""
        y, centre, epsilon = self._output(x, x.channels, Window((1, 1))), self._flag(), self._number(0, 1 << 40)
        scale = requantise(self.rng, x.channels, 1.5 * 2**NORM_FRACTION)
        offset = self._number(-128, 128)
        norm, epilogue = Norm(offset, centre, epsilon), Epilogue(self.epilogue(y, second=False).clip)
        return self._add(Layer(self._name(), x, y, norm=norm, requantise=scale, epilogue=epilogue))

    def multiply(self, x: Activation, b: Activation) -> Activation:
        """Add an element-wise product of two activations, with drawn offsets."""
        y = self._output(x, x.channels, Window((1, 1)))
        multiply = Multiplication(b, *(int(v) for v in self.rng.integers(-255, 256, 2)))
        scale = requantise(self.rng, x.channels, 150 * 150)
        epilogue = self.epilogue(y, second=False)
        return self._add(Layer(self._name(), x, y, multiply=multiply, requantise=scale, epilogue=epilogue))


@st.composite
def builders(draw: st.DrawFn, names: list[str] | None = None, forward: bool = False) -> Builder:
    """Draw an empty network for one of CONFIGS.

    names: the Configs to choose from. forward: let the vector unit write `vin`, too.
    """
    cfg = CONFIGS[draw(st.sampled_from(names or list(CONFIGS)))]
    cfg = replace(cfg, forward=True) if forward else cfg
    return Builder(Network(cfg), draw, np.random.default_rng(draw(st.integers(0, 1 << 32))))


def sample_tilings(cfg: Config, p: Workload, count: int, rng: np.random.Generator) -> list[Tiling]:
    """Draw `count` points of the tiling space of `p`, with repetition."""
    points = list(candidates(cfg, p))
    return [points[i] for i in rng.integers(0, len(points), count)]
