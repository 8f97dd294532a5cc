"""Price models, and search for one that computes the same bytes in less time (compiler/superoptimise)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import onnx

from celosia.compiler.frontend import naming_shapes, prepare
from celosia.compiler.graph.importer import read
from celosia.compiler.launch.image import LayerErrors
from celosia.compiler.layer import TilingError
from celosia.compiler.lowering import lower_prepared, planner_for
from celosia.compiler.options import Options, Source, expand_options
from celosia.compiler.program import Program
from celosia.compiler.superoptimise.price import INFEASIBLE, Price, Pricing, price_of
from celosia.compiler.tune.records import SHIPPED, load_requested
from celosia.garbage import raised_gc_threshold
from celosia.hw.spec.config import Config

MAX_TIMED_CHAINS = 20_000
"""Limit of the chains of layers of a Config whose cycles are remembered."""


@lru_cache(maxsize=8)
def _timed_chains(cfg: Config) -> dict[str, float]:
    """Return the cycles of chains of layers (Planner.timed) on `cfg`, which all models that are priced on it share."""
    return {}


@expand_options(Options)
def price(source: Source, options: Options) -> Price:
    """Return the cost of a model under the same options as `compile`: cycles of launches, and an estimate for the CPU.

    INFEASIBLE if layers do not fit the accelerator. Raises what `compile` does; nothing is self-checked.
    """
    options = replace(options, check=False)
    with naming_shapes(options.shapes), raised_gc_threshold():
        records = load_requested(options.records)
        prepared = prepare(source, options)
        planner = planner_for(prepared, options, records)
        timed = _timed_chains(prepared.cfg)
        if len(timed) > MAX_TIMED_CHAINS:
            timed.clear()
        timed |= planner.timed
        planner.timed = timed
        try:
            lowered = lower_prepared(prepared, planner, options, records)
        except (LayerErrors, TilingError):
            return INFEASIBLE
        return price_of(lowered.network, lowered.image, lowered.partition)


Compile = Callable[..., Program]
"""Type of `compile.compile`, which is passed in, since compile.py imports this module."""


def pricing(
    source: Source, config: Config | str | Path = "pynq", records: str | Path | None = SHIPPED,
    on_cpu: Compile | None = None,
) -> Pricing:  # fmt: skip
    """Return the functions that price models which a search makes of `source`.

    on_cpu: `compile`, to price models by the time that this processor takes for them; None to price them by cycles of
    the accelerator and an estimate for the CPU.
    """
    if on_cpu is None:
        cfg = Config.load(config)
        return Pricing(lambda model: price(model, cfg, records=records), lambda model: price(model, cfg, records=None))
    from celosia.compiler.superoptimise.price import gain, is_large, nanoseconds

    large = is_large((source if isinstance(source, onnx.ModelProto) else read(Path(source))).ByteSize())

    def compile_for_cpu(model: onnx.ModelProto) -> Program:
        return on_cpu(model, config, accelerator=False, check=False, records=records)

    def measure(model: onnx.ModelProto) -> Price:
        return Price(0, nanoseconds(compile_for_cpu(model), large), True)

    last: list[tuple[onnx.ModelProto, Program]] = []  # the last `before`, compiled

    def measure_gain(before: onnx.ModelProto, after: onnx.ModelProto) -> float:
        """Return how much faster `after` is; `before` is compiled once for consecutive calls."""
        if not last or last[0][0] is not before:
            last[:] = [(before, compile_for_cpu(before))]
        return gain(last[0][1], compile_for_cpu(after), large)

    return Pricing(measure, measure, measure_gain)


def optimise_source(source: Source, options: Options, compile: Compile) -> tuple[Source, str]:
    """Search for a model that takes less time, for as long as `options.optimise` says.

    Returns it with a text on how it was derived (superoptimise/derivation.py); `source` and "" if none was found.
    Raises BudgetError without a time or an oracle.
    """

    from celosia.compiler.superoptimise.derivation import text_in
    from celosia.compiler.superoptimise.optimise import optimise
    from celosia.compiler.superoptimise.search import BudgetError, parse_seconds
    from celosia.compiler.tune.kernel_trial import processor

    if options.optimise is None:
        raise BudgetError('fast_math is of a search, which has no time here: give optimise="60s", or leave it out')
    if options.oracle is None:
        raise BudgetError("there is no oracle to compare an optimised model with; call celosia.compile, or give one")
    options.say("looking for a model that takes less time")
    records = load_requested(options.records)
    optimised = optimise(
        source, pricing(source, options.config, options.records, None if options.accelerator else compile),
        parse_seconds(options.optimise), options.oracle, options.shapes, floats=not options.accelerator,
        records=records if records and records.path else None,
        config=Config.load(options.config).digest if options.accelerator else processor(), fast_math=options.fast_math,
    )  # fmt: skip
    options.say(f"{optimised.before} at first, {optimised.after} after {len(optimised.steps)} steps")
    return (optimised.model, text_in(optimised.model)) if optimised.steps else (source, "")
