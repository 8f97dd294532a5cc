"""An accelerator as a TVM program sees it (blocks, memories, intrinsics), and intrinsics that a program declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from celosia.compiler.expr.loops import Declared, For, Intrinsic
from celosia.compiler.expr.nodes import Expr
from celosia.compiler.expr.nodes import Tensor as Node
from celosia.compiler.tensorize import intrinsics as hw
from celosia.compiler.tensorize.intrinsic import (
    Args,
    ImplicitOperand,
    TensorIntrinsic,
    TileMismatch,
    TileOperation,
    match,
)
from celosia.driver.te.nodes import TensorExpr
from celosia.hw.spec.config import Config


@dataclass(frozen=True)
class Copies:
    """All DMA copies of an accelerator, as VTA writes them.

    `StageView.pragma` chooses the copy that moves between the memory of its stage and that of the tensor it reads.
    """

    environment: Environment


class Environment:
    """The accelerator of a Config, with the names of VTA's environment.

    Memories are `inp_scope`, `wgt_scope`, `acc_scope`, `out_scope`, `vin_scope` and `par_scope`; element types
    `inp_dtype`, `wgt_dtype`, `acc_dtype` and `out_dtype`; sizes of a block `BATCH`, `BLOCK_IN` and `BLOCK_OUT`.
    """

    inp_scope, wgt_scope, acc_scope, out_scope, vin_scope, par_scope = "inp", "wgt", "acc", "out", "vin", "par"
    inp_dtype = wgt_dtype = out_dtype = "int8"
    acc_dtype = "int32"

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.BATCH, self.BLOCK_IN, self.BLOCK_OUT = cfg.batch, cfg.block_in, cfg.block_out
        self._intrinsics = hw.declared(cfg)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the accelerator has no {name!r}; it has gemm, clip, requantise and dma_copy")

    @property
    def gemm(self) -> Declared:
        """The intrinsic acc += inp · wgt transposed, for one entry of each."""
        return self._intrinsics["gemm"]

    @property
    def clip(self) -> Declared:
        """The intrinsic that clips an entry of acc to bounds, and writes it as int8 to out."""
        return self._intrinsics["vector_acc"]

    @property
    def requantise(self) -> Declared:
        """The intrinsic that requantises an entry of acc by an entry of par, and writes it as int8 to out."""
        return self._intrinsics["requantise"]

    @property
    def dma_copy(self) -> Copies:
        """The argument of StageView.pragma for copies by LOAD or STORE."""
        return Copies(self)

    def copy(self, source: str, target: str) -> Declared:
        """Return the intrinsic that copies from memory `source` to `target`. ValueError where there is none."""
        if source == "out" and target == "workspace":
            return self._intrinsics["store"]
        if source != "dram" or f"load_{target}" not in self._intrinsics:
            raise ValueError(f"{self.cfg.name} has no copy from {source} to {target}")
        return self._intrinsics[f"load_{target}"]


def accelerator(config: str | Config) -> Environment:
    """Return the Environment of a Config, or of a preset by name."""
    return Environment(config if isinstance(config, Config) else Config.load(config))


# Declared intrinsics -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileBuffer:
    """A tile of an intrinsic, as the program's lowering function gets it."""

    node: Node

    def access_ptr(self, mode: str) -> TileBuffer:
        """Return the tile as an operand; mode: "r", "w" or "rw", which TVM needs and is ignored here."""
        return self


@dataclass(frozen=True)
class HardwareCall:
    """A call of an instruction, which a program's lowering function returns."""

    name: str
    operands: tuple[TileBuffer, ...]


def hardware_intrin(name: str, *operands: TileBuffer) -> HardwareCall:
    """Return a call of the instruction `name`.

    The name is only a label: the accelerator's instruction is the one that computes what the intrinsic declares.
    """
    return HardwareCall(name, operands)


ANYWHERE = "anywhere"
"""The memory of a declared intrinsic's tiles: any."""


@dataclass(frozen=True, eq=False)
class DeclaredIntrinsic(TensorIntrinsic):
    """An intrinsic that a program declares only by what it computes.

    On the CPU it is a loop nest; on an accelerator the one of `instructions` that computes the same. instructions: None
    for the CPU.
    """

    instructions: tuple[Declared, ...] | None = field(default=None)

    def for_accelerator(self, cfg: Config) -> DeclaredIntrinsic:
        """Return this intrinsic with the instructions of the accelerator of `cfg`."""
        return replace(self, instructions=tuple(hw.declared(cfg).values()))

    def match(self, nest: For, first: Expr, scope: Callable[[Node], str]) -> Intrinsic:
        """Match a loop nest with this intrinsic, then with an instruction (see `loops.Declared`). TileMismatch."""
        args = match(self, nest, first, lambda _: ANYWHERE)
        if self.instructions is None:
            return Intrinsic(self.name, args, self)
        reasons = [f"no instruction does what {self.name} does"]
        for instruction in self.instructions:
            try:
                return instruction.match(nest, first, scope)
            except TileMismatch as error:
                reasons += [str(error)] if instruction.reduces == self.reduces else []
        raise TileMismatch("; ".join(reasons[:2]))

    def argument_error(self, args: Args, scope: Callable[[Node], str]) -> str | None:
        """Return why arguments do not fit (see `loops.Declared`); tiles may lie in any memory."""
        return super().argument_error(args, lambda _: ANYWHERE)


def decl_tensor_intrin(op: TensorExpr, fcompute: Callable[[Any, Any], Any], name: str | None = None) -> Declared:
    """Declare an intrinsic that computes `op` from placeholders; these tensors are its tiles.

    fcompute: takes a list of the TileBuffers that are read, and a list of the one that is written; returns a
    `hardware_intrin`, or three as TVM has them (for a full tile, its reset, and an update). name: by default that of
    the first `hardware_intrin`.
    """
    behaviour = op.node
    tiles = TileOperation(op.name, behaviour, {}).tiles
    result = fcompute([TileBuffer(tile) for tile in tiles[1:]], [TileBuffer(behaviour)])
    calls: Iterable[Any] = result if isinstance(result, tuple) else (result,)
    first = next(iter(calls))
    if not isinstance(first, HardwareCall):
        raise ValueError(f"{op.name} is lowered to a hardware_intrin, not to {first!r}")
    return DeclaredIntrinsic(
        name or first.name, behaviour, dict.fromkeys((t.name for t in tiles), ANYWHERE), ImplicitOperand()
    )
