"""An accelerator in a program's terms: blocks, memories and intrinsics; and intrinsics that a program declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from celosia.compiler.expr.loops import Declared, For, Intrinsic
from celosia.compiler.expr.nodes import Expr
from celosia.compiler.expr.nodes import Tensor as Node
from celosia.compiler.tensorize import intrinsics as hw
from celosia.compiler.tensorize.intrinsic import Args, ImplicitOperand, TensorIntrinsic
from celosia.compiler.tensorize.match import TileMismatch, TileOperation, match
from celosia.driver.te.nodes import TensorExpr
from celosia.hw.spec.config import Config


@dataclass(frozen=True)
class Copies:
    """Copy directions, see Environment.dma_copy."""

    environment: Environment


class Environment:
    """The accelerator of a Config. Scopes are `inp_scope`, `wgt_scope`, `acc_scope`, `out_scope`, `vin_scope` and
    `par_scope`, element types `inp_dtype`, `wgt_dtype`, `acc_dtype` and `out_dtype`.
    """

    inp_scope, wgt_scope, acc_scope, out_scope, vin_scope, par_scope = "inp", "wgt", "acc", "out", "vin", "par"
    inp_dtype = wgt_dtype = out_dtype = "int8"
    acc_dtype = "int32"

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.BATCH, self.BLOCK_IN, self.BLOCK_OUT = cfg.batch, cfg.block_in, cfg.block_out
        self._known = hw.declared(cfg)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the accelerator has no {name!r}; it has gemm, clip, requantise and dma_copy")

    @property
    def gemm(self) -> Declared:
        """Intrinsic acc += inp . wgt transposed, for one entry of each."""
        return self._known["gemm"]

    @property
    def clip(self) -> Declared:
        """Intrinsic that clips an entry of acc to bounds, as int8, to out."""
        return self._known["vector_acc"]

    @property
    def requantise(self) -> Declared:
        """Intrinsic that scales an entry of acc with one of par, as int8, to out."""
        return self._known["requantise"]

    @property
    def dma_copy(self) -> Copies:
        """Copies for StageView.pragma: LOAD or STORE, by the memories."""
        return Copies(self)

    def copy(self, source: str, target: str) -> Declared:
        """Intrinsic that copies between these memories. ValueError where there is none."""
        if source == "out" and target == "workspace":
            return self._known["store"]
        if source != "dram" or f"load_{target}" not in self._known:
            raise ValueError(f"{self.cfg.name} has no copy from {source} to {target}")
        return self._known[f"load_{target}"]


def accelerator(config: str | Config) -> Environment:
    """The accelerator of a Config, or of a preset's name."""
    return Environment(config if isinstance(config, Config) else Config.load(config))


# Declared intrinsics -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileBuffer:
    """A tile, in the function that lowers an intrinsic."""

    node: Node

    def access_ptr(self, mode: str) -> TileBuffer:
        """Return the tile as an operand that is read ("r"), written ("w") or both ("rw")."""
        return self


@dataclass(frozen=True)
class HardwareCall:
    """An instruction by name, with its operands."""

    name: str
    operands: tuple[TileBuffer, ...]


def hardware_intrin(name: str, *operands: TileBuffer) -> HardwareCall:
    """The instruction `name`. Which one of the accelerator that is follows from what it is declared to compute."""
    return HardwareCall(name, operands)


ANYWHERE = "anywhere"


@dataclass(frozen=True, eq=False)
class DeclaredIntrinsic(TensorIntrinsic):
    """Intrinsic that a program declares by its behaviour alone: loops on the CPU; on an accelerator, whichever of
    `instructions` computes that.
    """

    instructions: tuple[Declared, ...] | None = field(default=None)

    def on(self, cfg: Config) -> DeclaredIntrinsic:
        """Return the intrinsic for the accelerator of `cfg`."""
        return replace(self, instructions=tuple(hw.declared(cfg).values()))

    def match(self, nest: For, first: Expr, scope: Callable[[Node], str]) -> Intrinsic:
        """See loops.Declared."""
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
        """See loops.Declared; its tiles may lie anywhere."""
        return super().argument_error(args, lambda _: ANYWHERE)


def decl_tensor_intrin(op: TensorExpr, fcompute: Callable[[Any, Any], Any], name: str | None = None) -> Declared:
    """An intrinsic that computes `op`, a tensor of placeholders, which are its tiles.

    fcompute: of lists of TileBuffers, those read and that which is written: a `hardware_intrin`, or three: for a whole
    tile, for its reset, and for one more step. The first one's name is the intrinsic's.
    """
    behaviour = op.node
    tiles = TileOperation(op.name, behaviour, {}).tiles
    computed = fcompute([TileBuffer(tile) for tile in tiles[1:]], [TileBuffer(behaviour)])
    calls: Iterable[Any] = computed if isinstance(computed, tuple) else (computed,)
    first = next(iter(calls))
    if not isinstance(first, HardwareCall):
        raise ValueError(f"{op.name} is lowered to a hardware_intrin, not to {first!r}")
    return DeclaredIntrinsic(
        name or first.name, behaviour, dict.fromkeys((t.name for t in tiles), ANYWHERE), ImplicitOperand()
    )
