"""Hand-written instructions for Configs with taps: a depthwise convolution, and a block of three convolutions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.launch.image import Constants
from celosia.compiler.layer import Activation, Epilogue, Gemm, Layer, Residual, Storage, Window
from celosia.compiler.program.model import pack_activation, unpack_activation
from celosia.compiler.tensorize import pack
from celosia.compiler.vthread.encode import encode
from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.compiler.vthread.verify import Run, verify_provenance
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import (
    GEMM_LOOPS,
    VECTOR_LOOPS,
    ASource,
    BSource,
    Buffer,
    Destination,
    Opcode,
    element_bytes,
)
from celosia.hw.spec.scratchpads import scratchpads
from celosia.sim.functional.fsim import FunctionalDevice

from .layers import Int8, meaning, requantise, residual, table

_SMALL = dict(
    inp_depth=256, wgt_depth=64, acc_depth=256, vin_depth=512, out_depth=128, par_depth=16, tap_depth=64, forward=True
)
CONFIGS = {
    "tiny": PRESETS["tiny"],
    "8x4-batch2": Config(batch=2, block_in=8, block_out=4, taps=3, **_SMALL),
    "8x4-taps2": Config(batch=2, block_in=8, block_out=4, taps=2, **_SMALL),
    "4x4-taps5": Config(block_in=4, block_out=4, taps=5, **_SMALL),
}
PAD = 7
"""The value of the padding around the input of the depthwise convolution."""


@dataclass(frozen=True)
class Shape:
    """Sizes and options of a block.

    equal: all weights of the depthwise convolution are 1. clip: the range to which the first layer clips.
    """

    height: int = 5
    width: int = 4
    kernel: int = 3
    stride: int = 1
    equal: bool = False
    clip: tuple[int, int] = (-100, 120)


def block_of(cfg: Config, shape: Shape) -> Layer:
    """Return a block of three convolutions with random weights.

    Its channels do not fill the last channel block; its images fill two batches.
    """
    rng = np.random.default_rng(3)
    channels, middle, images = cfg.block_in + 1, 4 * cfg.block_out - 1, 2 * cfg.batch
    k, s, pad = shape.kernel, shape.stride, shape.kernel // 2
    rows, columns = ((size + 2 * pad - k) // s + 1 for size in (shape.height, shape.width))

    def act(name: str, channels: int, height: int, width: int) -> Activation:
        return Activation.alone(cfg, name, images, channels, height, width)

    def conv(x: Activation, y: Activation, inputs: int, window: Window, groups: int = 1, **rest: object) -> Layer:
        weights = rng.integers(-128, 128, (y.channels, inputs, *window.kernel)).astype(np.int8)
        scale = requantise(rng, y.channels, 74 * 74 * float(np.sqrt(np.prod(weights.shape[1:]))))
        gemm = Gemm(weights, groups)
        return Layer(f"to {y.name}", x, y, window, gemm=gemm, requantise=scale, **rest)  # type: ignore[arg-type]

    x = act("x", channels, shape.height, shape.width)
    wide, deep = act("wide", middle, shape.height, shape.width), act("deep", middle, rows, columns)
    y = act("y", channels, rows, columns)
    add = residual(rng, x) if x.dims == y.dims else None
    window = Window((k, k), (s, s), pads=(pad,) * 4)
    layers = (
        conv(x, wide, channels, Window((1, 1)), epilogue=Epilogue(shape.clip)),
        conv(wide, deep, 1, window, groups=middle, pad_value=PAD, epilogue=Epilogue(table=table(rng))),
        conv(deep, y, middle, Window((1, 1)), epilogue=Epilogue((-110, 127), residual=add)),
    )
    if shape.equal:
        assert layers[1].gemm is not None
        layers[1].gemm.weights[...] = 1
    return Layer.block(layers)


class Hand:
    """Hand-written instructions of one layer, grouped by their purpose, with constants and DRAM addresses.

    addresses: DRAM addresses of the storages of the layer's x and y; by default one after the other. packed:
    constants, which may hold those of other layers, too.
    """

    def __init__(
        self, cfg: Config, layer: Layer, addresses: dict[Storage, int] | None = None, packed: Constants | None = None
    ) -> None:
        self.packed = packed or Constants(4096)
        self.cfg, self.layer, self.base = cfg, layer, self.packed.base
        self.x, self.y = layer.x, layer.y
        self.input_values = np.random.default_rng(4).integers(-128, 128, self.x.dims).astype(np.int8)
        self.addresses = addresses or {self.x.storage: 0, self.y.storage: -(-self.x.size(cfg) // 64) * 64}
        self.stream: list[StreamInstruction] = []
        self.roles: dict[str, list[StreamInstruction]] = defaultdict(list)
        self.used: dict[str, int] = defaultdict(int)
        """Entries of each scratchpad that are allocated."""
        self.emit()
        self.constants = self.packed.data()

    def emit(self) -> None:
        """Append the instructions of the layer to `stream`."""
        raise NotImplementedError

    # Running and checking -------------------------------------------------------------------------------------

    def codes(self) -> NDArray[np.uint8]:
        """Return the instructions with fresh tokens, [count, bytes]."""
        for i in self.stream:
            i.fields |= {"wait": 0, "post": 0}
        insert_tokens(self.cfg, self.stream, self.base)
        return encode(self.cfg, self.stream)

    def verify(self, code: NDArray[np.uint8] | None = None) -> None:
        """Raise VerifyError if the instructions do not compute what the layer means."""
        code = self.codes() if code is None else code
        run = Run(code, [self.layer], np.zeros(len(code), np.int32), {self.x.storage}, {self.y.storage})
        verify_provenance(self.cfg, [run], self.addresses, self.base, self.constants)

    def expected(self) -> Int8:
        """Return the output of the layer, computed in numpy."""
        values = {self.x: self.input_values}
        for layer in self.layer.layers or (self.layer,):
            values[layer.y] = meaning(layer, values)
        return values[self.y]

    def run(self, checking: bool = False) -> Int8:
        """Run the instructions on the functional simulator and return the output. DRAM is first filled with noise."""
        cfg, code, x, y = self.cfg, self.codes(), self.x, self.y
        device = FunctionalDevice(cfg, checking)
        device.allocate(self.base + len(self.constants) + code.size)
        device.write(0, np.random.default_rng(0).integers(0, 256, self.base, np.uint8))
        device.write(self.base, np.concatenate([self.constants, code.reshape(-1)]))
        device.write(self.addresses[x.storage], pack_activation(cfg, self.input_values, x.storage_groups))
        device.run(self.base + len(self.constants), len(code))
        data = device.read(self.addresses[y.storage], y.size(cfg))
        return unpack_activation(cfg, data, y.dims, y.storage_groups)

    def drop(self, instruction: StreamInstruction) -> None:
        """Remove an instruction from the stream."""
        self.stream = [i for i in self.stream if i is not instruction]

    def insert_after(self, instruction: StreamInstruction, opcode: Opcode, fields: dict[str, int]) -> None:
        """Insert a new instruction after `instruction`."""
        index = next(n for n, i in enumerate(self.stream) if i is instruction)
        self.stream.insert(index + 1, StreamInstruction(opcode, fields))

    # Emission -------------------------------------------------------------------------------------------------

    def add(self, role: str, opcode: Opcode, **fields: int) -> None:
        """Append an instruction with the given purpose. Loops and sizes default to 1."""
        loops = {Opcode.GEMM: GEMM_LOOPS, Opcode.VECTOR: VECTOR_LOOPS}.get(opcode, ())
        sizes = {} if loops else dict(x_size=1, y_size=1, z_size=1)
        i = StreamInstruction(opcode, {f"extent_{loop}": 1 for loop in loops} | sizes | fields)
        self.stream.append(i)
        self.roles[role].append(i)

    def take(self, pad: str, entries: int) -> int:
        """Allocate `entries` of a scratchpad and return the first of them."""
        first = self.used[pad]
        self.used[pad] += entries
        depth: int = getattr(self.cfg, f"{pad}_depth", self.cfg.lut_count)
        assert self.used[pad] <= depth, (pad, self.used[pad])
        return first

    def load_constants(self, pad: str, blob: NDArray[np.uint8]) -> int:
        """Append a LOAD of all of `blob` to a scratchpad and return its first entry."""
        pieces = scratchpads(self.cfg)[pad].pieces
        elements = len(blob) // element_bytes(self.cfg, Buffer[pad.upper()])
        base = self.take(pad, elements // pieces)
        self.add(
            f"load {pad}", Opcode.LOAD, buffer=Buffer[pad.upper()], dram_addr=self.packed.place(blob),
            x_size=elements, sram_base=base * pieces, sram_x=1,
        )  # fmt: skip
        return base

    def load_taps(self, weights: Int8) -> int:
        """Load depthwise weights and return their first entry in `tap`.

        The entries are [slices][kernel rows][steps][slots][block_out] int8; a step holds `taps` columns of the
        kernel.
        """
        cfg, (channels, _, *kernel) = self.cfg, weights.shape
        slices, steps = pack.blocks(channels, cfg.block_out), pack.blocks(kernel[1], cfg.taps)
        entries = np.zeros((slices, kernel[0], steps, *scratchpads(cfg)["tap"].shape), np.int8)
        for channel, column in np.ndindex(channels, kernel[1]):
            n, lane = divmod(channel, cfg.block_out)
            entries[n, :, column // cfg.taps, column % cfg.taps, lane] = weights[channel, 0, :, column]
        return self.load_constants("tap", entries.view(np.uint8).reshape(-1))

    def epilogue(self, layer: Layer) -> dict[str, int]:
        """Return the fields of requantisation, clip and table."""
        assert layer.requantise is not None
        low, high = layer.epilogue.clip
        fields = dict(requantise=1, zero_point=layer.requantise.zero_point, clip_lo=low, clip_hi=high)
        if layer.epilogue.table is not None:
            fields |= dict(lookup=1, table=self.tables[layer.name])
        return fields

    def load_tables(self, *layers: Layer) -> None:
        """Load the tables of the layers that have one."""
        tables = {layer.name: layer.epilogue.table for layer in layers}
        self.tables = {
            name: self.load_constants("lut", table.view(np.uint8))
            for name, table in tables.items()
            if table is not None
        }


class DepthwiseByHand(Hand):
    """A depthwise convolution whose input is loaded to `vin` as a whole."""

    def __init__(self, cfg: Config) -> None:
        rng, channels = np.random.default_rng(5), 2 * cfg.block_out + 1
        x, y = (Activation.alone(cfg, name, 1, channels, 4, 5) for name in "xy")
        weights = rng.integers(-128, 128, (channels, 1, 3, 3)).astype(np.int8)
        scale = requantise(rng, channels, 74 * 74 * 3.0)
        window, gemm = Window((3, 3), pads=(1, 1, 1, 1)), Gemm(weights, channels)
        super().__init__(cfg, Layer("depthwise", x, y, window, PAD, gemm, requantise=scale))

    def emit(self) -> None:
        cfg, layer, y = self.cfg, self.layer, self.y
        assert layer.gemm is not None and layer.requantise is not None
        blocks, pieces, steps = pack.blocks(y.channels, cfg.block_out), cfg.out_pieces, pack.blocks(3, cfg.taps)
        row, plane, piece = y.width + 2, y.height * y.width, cfg.piece_bytes
        entries = (y.height + 3) * row
        vin, out = self.take("vin", blocks * entries), self.take("out", blocks * plane)
        tap, par = (
            self.load_taps(layer.gemm.weights),
            self.load_constants("par", pack.arrange_parameters(cfg, layer.requantise)),
        )
        self.load_tables(layer)
        for n in range(blocks):
            self.add(
                "load", Opcode.LOAD, buffer=Buffer.VIN, dram_z=plane * piece, dram_y=y.width * piece,
                dram_addr=n * pieces * plane * piece, x_size=y.width, y_size=y.height, z_size=pieces,
                sram_base=(vin + n * entries) * pieces, sram_x=pieces, sram_y=row * pieces, sram_z=1,
                pad_top=1, pad_bottom=2, pad_left=1, pad_right=1, pad_value=PAD,
            )  # fmt: skip
        self.add(
            "taps", Opcode.VECTOR, destination=Destination.OUT, taps=1, a_source=ASource.VIN,
            extent_n=blocks, extent_y=y.height, extent_x=y.width, extent_r=3, extent_s=steps,
            a_base=vin, a_n=entries, a_y=row, a_x=1, a_r=row, a_s=cfg.taps,
            tap_base=tap, tap_n=3 * steps, tap_r=steps, tap_s=1, par_base=par, par_n=1,
            dst_base=out, dst_n=plane, dst_y=y.width, dst_x=1, **self.epilogue(layer),
        )  # fmt: skip
        for n in range(blocks):
            self.add(
                "store", Opcode.STORE, x_size=y.width, y_size=y.height, z_size=min(pieces, y.groups(cfg) - n * pieces),
                dram_addr=self.addresses[y.storage] + n * pieces * plane * piece, dram_y=y.width * piece,
                dram_z=plane * piece, sram_base=(out + n * plane) * pieces, sram_x=pieces, sram_y=y.width * pieces,
                sram_z=1,
            )  # fmt: skip


class BlockByHand(Hand):
    """A 1x1 convolution, a depthwise one and another 1x1 one.

    A tile is some rows of one batch of images. For each slice (block_out of the middle channels), GEMM computes `wide`,
    which VECTOR writes to vin, with padding around it. Then the taps compute `deep`, which goes to inp, and GEMM adds
    its product to the sums of y. Slices and tiles alternate between two slots in each scratchpad.

    ahead: GEMM computes the next slice of `wide` before it adds this one; all slices of `deep` use one slot of inp.
    """

    def __init__(
        self, cfg: Config, block: Layer | Shape | None = None, tile_rows: int = 3, ahead: bool = False,
        addresses: dict[Storage, int] | None = None, packed: Constants | None = None,
    ) -> None:  # fmt: skip
        self.block = block if isinstance(block, Layer) else block_of(cfg, block or Shape())
        self.tile_rows, self.ahead = tile_rows, ahead
        super().__init__(cfg, self.block, addresses, packed)

    def emit(self) -> None:
        cfg, x, y = self.cfg, self.x, self.y
        self.first, self.middle, self.last = self.block.layers
        self.kernel, self.stride, self.pad = (v[0] for v in (
            self.middle.window.kernel, self.middle.window.strides, self.middle.window.pads
        ))  # fmt: skip
        self.slices, self.parts = pack.blocks(self.middle.y.channels, cfg.block_out), cfg.inp_pieces
        self.blocks_in, self.blocks_out = pack.blocks(x.channels, cfg.block_in), pack.blocks(y.channels, cfg.block_out)
        self.steps = pack.blocks(self.kernel, cfg.taps)
        rows = min(self.tile_rows, y.height)
        wide_rows = (rows - 1) * self.stride + self.kernel
        self.row = x.width + 2 * self.pad
        """Entries of a row of `wide` with its padding."""
        # Taps beyond the kernel read past the end of the last row.
        self.wide_entries = wide_rows * self.row + self.steps * cfg.taps - self.kernel
        tile = self.blocks_out * rows * y.width
        slots = {
            "x": ("inp", self.blocks_in * wide_rows * x.width), "deep": ("inp", rows * y.width),
            "wide": ("vin", self.wide_entries), "residual": ("vin", tile),
            "sums of wide": ("acc", wide_rows * x.width), "sums": ("acc", tile), "out": ("out", tile),
        }  # fmt: skip
        self.slots = {name: [self.take(where, size) for _ in range(2)] for name, (where, size) in slots.items()}
        if self.ahead:
            self.slots["deep"][1] = self.slots["deep"][0]
        first, middle, last = (layer.gemm for layer in self.block.layers)
        assert first is not None and middle is not None and last is not None
        self.wgt = [self.load_constants("wgt", pack.arrange_weights(cfg, gemm)) for gemm in (first, last)]
        scales = [layer.requantise for layer in self.block.layers if layer.requantise is not None]
        self.par = [self.load_constants("par", pack.arrange_parameters(cfg, scale)) for scale in scales]
        self.tap = self.load_taps(middle.weights)
        self.load_tables(*self.block.layers)
        tiles = [(b, r) for b in range(y.batches(cfg)) for r in range(0, y.height, rows)]
        for number, (batch, first_row) in enumerate(tiles):
            self._tile(number % 2, batch, first_row, min(rows, y.height - first_row))

    def _tile(self, slot: int, batch: int, first: int, rows: int) -> None:
        """Emit the rows first .. first + rows of y. They need the rows `top` to `bottom` of `wide`, without padding."""
        cfg, x = self.cfg, self.x
        above = first * self.stride - self.pad
        top, bottom = max(above, 0), min(above + (rows - 1) * self.stride + self.kernel, x.height)
        plane, piece = x.height * x.width, cfg.piece_bytes
        image = self.addresses[x.storage] + batch * x.storage_groups * plane * piece
        place = self.slots["x"][slot]
        for block in range(self.blocks_in):
            self.add(
                "load x", Opcode.LOAD, buffer=Buffer.INP, dram_z=plane * piece, dram_y=x.width * piece,
                dram_addr=image + (block * self.parts * plane + top * x.width) * piece,
                x_size=x.width, y_size=bottom - top, z_size=self.parts,
                sram_base=(place + block * (bottom - top) * x.width) * self.parts,
                sram_x=self.parts, sram_y=x.width * self.parts, sram_z=1,
            )  # fmt: skip
        if self.last.epilogue.residual is not None:
            self.add(
                "load residual", Opcode.LOAD, buffer=Buffer.VIN, dram_z=plane * piece, dram_y=x.width * piece,
                dram_addr=image + first * x.width * piece, x_size=x.width, y_size=rows, z_size=self.blocks_out,
                sram_base=self.slots["residual"][slot], sram_x=1, sram_y=x.width, sram_z=rows * x.width,
            )  # fmt: skip
        for n in range(self.slices):
            for next_ in range(0 if n == 0 else n + self.ahead, min(n + 1 + self.ahead, self.slices)):
                self._gemm(next_, place, bottom - top)
            self._wide(n, bottom - top, (top - above) * self.row + self.pad)
            self._deep(n, rows)
            if n % self.parts == self.parts - 1:
                self._sum(n // self.parts, slot, rows)
        self._out(slot, batch, first, rows)

    def _gemm(self, n: int, x: int, rows: int) -> None:
        """Emit the sums of slice `n` of `wide`, from the entries of inp at `x`."""
        width = self.x.width
        self.add(
            "gemm wide", Opcode.GEMM, extent_y=rows, extent_x=width, extent_k=self.blocks_in,
            acc_base=self.slots["sums of wide"][n % 2], acc_y=width, acc_x=1,
            inp_base=x, inp_y=width, inp_x=1, inp_k=rows * width, wgt_base=self.wgt[0] + n * self.blocks_in, wgt_k=1,
        )  # fmt: skip

    def _wide(self, n: int, rows: int, inside: int) -> None:
        """Emit slice `n` of `wide`. Its first element lies `inside` entries behind the start of its padding."""
        width, slot, sums = self.x.width, self.slots["wide"][n % 2], self.slots["sums of wide"][n % 2]
        pad = self.middle.pad_value
        self.add(
            "pad", Opcode.VECTOR, destination=Destination.VIN, extent_x=self.wide_entries, dst_base=slot, dst_x=1,
            a_base=sums, clip_lo=pad, clip_hi=pad,
        )  # fmt: skip
        self.add(
            "wide", Opcode.VECTOR, destination=Destination.VIN, extent_y=rows, extent_x=width,
            dst_base=slot + inside, dst_y=self.row, dst_x=1, a_base=sums, a_y=width, a_x=1,
            par_base=self.par[0] + n, **self.epilogue(self.first),
        )  # fmt: skip

    def _deep(self, n: int, rows: int) -> None:
        """Emit slice `n` of `deep`, which is a part of an entry of inp."""
        width, k, stride = self.y.width, self.kernel, self.stride
        slot = self.slots["deep"][n // self.parts % 2]
        self.add(
            "taps", Opcode.VECTOR, destination=Destination.INP, taps=1, a_source=ASource.VIN,
            extent_y=rows, extent_x=width, extent_r=k, extent_s=self.steps,
            a_base=self.slots["wide"][n % 2], a_y=stride * self.row, a_x=stride, a_r=self.row, a_s=self.cfg.taps,
            tap_base=self.tap + n * k * self.steps, tap_r=self.steps, tap_s=1,
            dst_base=slot * self.parts + n % self.parts, dst_y=width * self.parts, dst_x=self.parts,
            par_base=self.par[1] + n, **self.epilogue(self.middle),
        )  # fmt: skip

    def _sum(self, block: int, slot: int, rows: int) -> None:
        """Emit the GEMM that adds an input block of the last convolution to the sums."""
        width = self.y.width
        self.add(
            "gemm y", Opcode.GEMM, extent_n=self.blocks_out, extent_y=rows, extent_x=width,
            acc_base=self.slots["sums"][slot], acc_n=rows * width, acc_y=width, acc_x=1,
            inp_base=self.slots["deep"][block % 2], inp_y=width, inp_x=1, accumulate=int(block > 0),
            wgt_base=self.wgt[1] + block, wgt_n=self.slices // self.parts,
        )  # fmt: skip

    def _out(self, slot: int, batch: int, first: int, rows: int) -> None:
        """Emit the epilogue of the last convolution and the STORE of the tile."""
        y, piece, out = self.y, self.cfg.piece_bytes, self.slots["out"][slot]
        steps = {"n": rows * y.width, "y": y.width, "x": 1}
        fields = {f"{operand}_{loop}": step for operand in ("dst", "a") for loop, step in steps.items()}
        add = self.last.epilogue.residual
        if add is not None:
            fields |= {f"b_{loop}": step for loop, step in steps.items()} | self._residual(add, slot)
        self.add(
            "out", Opcode.VECTOR, destination=Destination.OUT, extent_n=self.blocks_out, extent_y=rows,
            extent_x=y.width, dst_base=out, a_base=self.slots["sums"][slot], par_base=self.par[2], par_n=1,
            **self.epilogue(self.last), **fields,
        )  # fmt: skip
        plane = y.height * y.width
        self.add(
            "store", Opcode.STORE, x_size=y.width, y_size=rows, z_size=self.blocks_out,
            dram_addr=self.addresses[y.storage] + (batch * y.storage_groups * plane + first * y.width) * piece,
            dram_y=y.width * piece, dram_z=plane * piece,
            sram_base=out, sram_x=1, sram_y=y.width, sram_z=rows * y.width,
        )  # fmt: skip

    def _residual(self, add: Residual, slot: int) -> dict[str, int]:
        """Return the fields of the rescale-add of x."""
        return dict(
            rescale_add=1, b_source=BSource.VIN, b_base=self.slots["residual"][slot], scale_v=add.scale_v,
            scale_b=add.scale_b, scale_c=add.scale_c, scale_shift=add.shift, add_lo=add.lo, add_hi=add.hi,
        )  # fmt: skip
