"""Optimise an ONNX model to fewer cycles on an accelerator, with equal bytes under onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from celosia.compiler.compile import compile as compiled
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.dimensions import Shapes
from celosia.compiler.options import Options, Run, Source, expand_options
from celosia.compiler.pricing import pricing
from celosia.compiler.program import Program
from celosia.compiler.superoptimise.budget import BudgetError
from celosia.compiler.superoptimise.optimise import Optimised
from celosia.compiler.superoptimise.optimise import optimise as optimised
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.state import SearchState
from celosia.compiler.tune.records import Records
from celosia.driver.choices import SUPEROPTIMISERS
from celosia.driver.host.oracle import open_model, require_onnxruntime
from celosia.hw.spec.config import Config

if TYPE_CHECKING:
    from celosia.compiler.tune.device_pool import Fleet


def optimise(
    source: str | Path | onnx.ModelProto, config: str | Path | Config = "pynq", *, budget: float = 60.0,
    shapes: Shapes | None = None, rules: Sequence[RewriteRule] = (), search: str = SUPEROPTIMISERS[0],
    progress: Callable[[str], None] = lambda stage: None, told: Callable[[SearchState], None] = lambda state: None,
    accelerator: bool = True, fast_math: bool = False, records: str | Path | None = None,
    tune: int = 0, jobs: int = 0, pool: str | None = None, fleet: Fleet | None = None,
) -> Optimised:  # fmt: skip
    """Rewrite a model by rules that are proved, until no rewritten one takes fewer cycles or `budget` seconds are over.

    accelerator: False for a model that runs on this processor alone; then rules of floats are taken, too, and what
    counts is the time of its kernels, on one thread.

    fast_math: rules are taken, too, that hold where floats are real numbers, so that they are rounded elsewhere.
    Outputs are then as near to the original's as rounding may bring them (compiler/superoptimise/rounding.py), or the
    model is refused; `Optimised.report` has how near they are, under "fast_math".

    shapes: of inputs whose sizes are open, which the optimised model has then. rules: beside Celosia's own; they are
    proved now, which needs z3. `Optimised.report` says under "rules" in how many places each fits, and what it saves at
    most by estimate, whether it was taken or not. search: of choices.SUPEROPTIMISERS. queue goes on with what is a
    little dearer than the best, too, greedy takes the best next step. Ctrl-C ends the search and keeps the best.
    `Optimised.model` is the original where nothing better was found; what is better gives the bytes of the original
    under onnxruntime, for random inputs.

    records: a file, as that of `celosia tune`, which keeps what was found: the next search of the model goes on from
    there, and ends at once where this one has found all, or has had as long. It need not be there yet.

    tune: trials of schedules, as `celosia tune` makes them, of the original and of each of the five best, after
    `budget`: the one that takes fewest cycles then is taken; records keep these trials, too, for `compile(records=)`.

    jobs, pool: who weighs steps, several at a time, and who tunes, as `celosia.tune` has it; 0 jobs: this process.
    Their price of a step is an estimate; the whole is priced, and bytes are compared, here. A step whose device gives
    no answer is left out; where no device is left, this process goes on. fleet: other devices, which stay open.

    >>> import celosia
    >>> found = celosia.optimise(celosia.models.demo_model_path(), "tiny", budget=1)
    >>> found.report["cycles"] <= found.report["cycles_before"]
    True

    Raises BudgetError, ModelError, ConfigError, RuleError, RecordsError, OracleError for a model that onnxruntime does
    not run, PoolError, and MissingLibrary where onnxruntime is not installed.
    """
    from celosia.compiler.tune.kernels.kernel_trial import processor
    from celosia.driver.tune.weighing import weigh_with_fleet

    _check_arguments(accelerator, bool(jobs or pool or fleet))
    cfg = Config.load(config)
    progress("reading the model")

    def oracle(model: onnx.ModelProto) -> Run:
        progress("comparing with the original under onnxruntime")
        return open_model(model)

    known_records = None if records is None else Records.load(records, must_exist=False)
    with _open_measuring_fleet(tune if accelerator else 0, jobs, pool, fleet) as other_devices:
        costs = pricing(source, cfg, on_cpu=None if accelerator else compiled)
        if other_devices is not None and tune:
            costs = costs._replace(tuned=partial(_tuned_cycles, cfg, tune, records, other_devices, progress))
        with weigh_with_fleet(
            other_devices if jobs or pool or fleet else None, cfg, costs, fleet is not None
        ) as shared:
            result = optimised(
                source, shared, budget, oracle, shapes, own=rules, told=told, way=search, floats=not accelerator,
                records=known_records, config=cfg.digest if accelerator else processor(), fast_math=fast_math,
            )  # fmt: skip
        result.state.left_out = {} if other_devices is None else dict(other_devices.left_out)
    return result


def _open_measuring_fleet(
    trials: int, jobs: int, pool: str | None, fleet: Fleet | None
) -> AbstractContextManager[Fleet | None]:  # fmt: skip
    """Open the fleet that weighs steps and measures schedules: now, so that a pool that does not answer costs no
    search. `fleet` stays open."""
    if fleet is not None or not (trials or jobs or pool):
        return nullcontext(fleet)
    from celosia.compiler.tune.layer_trial import CostSource
    from celosia.compiler.tune.tuner_options import DEADLINE
    from celosia.driver.tune.fleet import open_fleet
    from celosia.driver.tune.weighing import STEP_SECONDS
    from celosia.hw.boards.boards import memory_model, memory_model_text

    judge = CostSource("timed", memory_model_text(memory_model("zynq-hp")))
    return open_fleet(judge, jobs, pool, DEADLINE if trials else STEP_SECONDS)


def _tuned_cycles(
    cfg: Config, trials: int, records: str | Path | None, fleet: Fleet, progress: Callable[[str], None],
    model: onnx.ModelProto,
) -> float:  # fmt: skip
    """Cycles of a model with schedules of its own; none for one without anything on the accelerator."""
    from celosia.driver.tune.tune import tune as tune_model

    progress("tuning one of the best")
    try:
        tuning = tune_model(model, cfg, trials=trials, records=records, fleet=fleet, check=False)
    except ModelError:
        return 0
    return float(tuning.report["cycles"])


def _check_arguments(accelerator: bool, other_devices: bool) -> None:
    """Check the arguments. MissingLibrary; BudgetError where other processes would measure this processor."""
    require_onnxruntime()
    if other_devices and not accelerator:
        raise BudgetError("the time of this processor is measured in one process alone; leave out jobs and pool")


@expand_options(Options)
def compile(source: Source, options: Options) -> Program:
    """Compile as `celosia.compiler.compile.compile`, whose text it has, with onnxruntime as the oracle of
    `optimise`."""
    if options.optimise is not None and options.oracle is None:
        require_onnxruntime()
        options = replace(options, oracle=open_model)
    return compiled(source, **vars(options))


compile.__doc__ = compiled.__doc__
