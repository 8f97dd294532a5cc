"""`celosia.optimise`: rewrite an ONNX model to take fewer cycles, with equal bytes under onnxruntime.

The search is in `compiler/superoptimise/`; here onnxruntime, fleets and tuning are added to it. `celosia.compile`
stands here, too: with option `optimise` it runs that search first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.dimensions import Shapes
from celosia.compiler.options import Options, Run, Source, expand_options
from celosia.compiler.pricing import pricing
from celosia.compiler.program import Program
from celosia.compiler.superoptimise.optimise import Optimised
from celosia.compiler.superoptimise.optimise import optimise as search_model
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.search import BudgetError, SearchState
from celosia.compiler.tune.records import Records
from celosia.driver.choices import SUPEROPTIMISERS
from celosia.driver.workstation.oracle import open_model, require_onnxruntime
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
    """Rewrite a model by proved rules, until no rewritten model takes fewer cycles or the time is over.

    A better model gives the bytes of the original under onnxruntime, for random inputs. Ctrl-C ends the search and
    keeps the best model.

    Args:
        source: The model: its path, or its contents as an onnx.ModelProto.
        config: Accelerator, as `celosia.compile` takes it.
        budget: Limit of the search, in seconds.
        shapes: Shapes of inputs whose sizes are open, by name; the optimised model has these. None: no shape is fixed.
        rules: Rules to apply besides Celosia's own. They are proved now, which needs z3.
        search: "queue" also continues from models that cost a little more than the best; "greedy" takes the best next
            step.
        progress: Function that is called with the name of each stage.
        told: Function that is called with the SearchState.
        accelerator: False for a model that runs only on this processor. Then rules on floats are used, too, and the
            cost is the time of its kernels on one thread.
        fast_math: Also use rules that hold for real numbers but round floats differently. Outputs then differ from the
            original's by rounding only (compiler/superoptimise/compare_outputs.py), or the model is refused.
        records: File, as of `celosia tune`, that keeps the results; it is made if it does not exist. The next search of
            the model continues from them. It ends at once if this search was complete, or took as long. None: results
            are not kept.
        tune: Number of trials of schedules, as of `celosia tune`, of the original and of each of the five best models,
            after `budget`. The model that then takes the fewest cycles wins. `records` keep these trials, too, for
            `compile(records=)`.
        jobs: Number of processes that price steps, several at a time, and that tune; 0: this process. Their price of a
            step is an estimate. Complete models are priced, and bytes compared, in this process. A step without an
            answer is left out. If all devices are lost, this process continues alone.
        pool: "dask://HOST:PORT", whose workers price steps and tune, as `celosia.tune` takes it. None: no pool.
        fleet: Devices of the caller, which stay open. None: `jobs` and `pool` say which devices work.

    Returns:
        An Optimised. Its `model` is the best model, or the original where no better one exists. Its `report` is a
            dictionary with these keys:

            - `cycles_before`, `cycles`: clock cycles of all launches, before and after
            - `host_before`, `host`: cost of operators on the CPU, roughly in the same cycles; nanoseconds where
              `measured`
            - `measured`: whether the costs are times of kernels on this processor
            - `priced`: number of models whose cost was computed
            - `weighed`: number of steps whose saving was estimated
            - `seconds`: time of the search, in seconds
            - `ended`: "nothing left", "budget", "known" or "interrupted"
            - `bests`: seconds and price of each new best model, the original first
            - `tuned`: clock cycles with tuned schedules, of the original and of the last best models
            - `refused`: a sentence for each better model that did not agree with the original
            - `left_out`: devices by name, with the reason
            - `steps`: each step with its rule, proof, cycles and gain
            - `rules`: a row for each of the caller's rules, used or not. `matched`: number of places of the model where
              it fits. `weighed`: number of its steps whose saving was estimated. `saves`: the largest of these savings.
              `taken`: number of its steps in the result
            - `changes`: operators before and after
            - `fast_math`: only with fast_math: `outputs`, the differences of each output; `bound`, their limit; number
              of `samples`

    Raises:
        BudgetError: `budget` is not positive, or `jobs` or `pool` are passed where this processor is timed.
        ModelError: The model is invalid, or its sizes are not known.
        ConfigError: The Config is invalid, or there is none of that name.
        RuleError: A rule cannot be proved, or `fast_math` is passed with the accelerator.
        RecordsError: The file of records cannot be read.
        OracleError: onnxruntime does not run the model.
        PoolError: The pool is none, or has no worker.
        MissingLibrary: onnxruntime is not installed.

    Examples:
        >>> import celosia
        >>> found = celosia.optimise(celosia.models.demo_model_path(), "tiny", budget=1)
        >>> found.report["cycles"] <= found.report["cycles_before"]
        True
    """
    from celosia.compiler.tune.kernel_trial import processor
    from celosia.driver.tune.weighing import weigh_with_fleet

    _check_arguments(accelerator, bool(jobs or pool or fleet))
    cfg = Config.load(config)
    progress("reading the model")

    def oracle(model: onnx.ModelProto) -> Run:
        """Return a function that runs a model under onnxruntime, to compare bytes."""
        progress("comparing with the original under onnxruntime")
        return open_model(model)

    known_records = None if records is None else Records.load(records, must_exist=False)
    with _open_measuring_fleet(tune if accelerator else 0, jobs, pool, fleet) as measuring_fleet:
        costs = pricing(source, cfg, on_cpu=None if accelerator else compile_model)
        if measuring_fleet is not None and tune:
            costs = costs._replace(tuned=partial(_tuned_cycles, cfg, tune, records, measuring_fleet, progress))
        with weigh_with_fleet(
            measuring_fleet if jobs or pool or fleet else None, cfg, costs, fleet is not None
        ) as fleet_costs:
            result = search_model(
                source, fleet_costs, budget, oracle, shapes, own=rules, told=told, way=search, floats=not accelerator,
                records=known_records, config=cfg.digest if accelerator else processor(), fast_math=fast_math,
            )  # fmt: skip
        result.state.excluded_devices = {} if measuring_fleet is None else dict(measuring_fleet.excluded_devices)
    return result


def _open_measuring_fleet(
    trials: int, jobs: int, pool: str | None, fleet: Fleet | None
) -> AbstractContextManager[Fleet | None]:  # fmt: skip
    """Return a context of the fleet that prices steps and measures schedules; None in it where this process does both.

    It opens before the search, so that a pool that does not answer is an error at once. `fleet`, the caller's, stays
    open.
    """
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
    """Return the cycles of a model after tuning its schedules; 0 where nothing of it runs on the accelerator."""
    from celosia.driver.tune.tune import tune as tune_model

    progress("tuning one of the best")
    try:
        tuning = tune_model(model, cfg, trials=trials, records=records, fleet=fleet, check=False)
    except ModelError:
        return 0
    return float(tuning.report["cycles"])


def _check_arguments(accelerator: bool, uses_fleet: bool) -> None:
    """Raise MissingLibrary without onnxruntime; BudgetError where other processes would time kernels of this
    processor."""
    require_onnxruntime()
    if uses_fleet and not accelerator:
        raise BudgetError("the time of this processor is measured in one process alone; leave out jobs and pool")


@expand_options(Options)
def compile(source: Source, options: Options) -> Program:
    """Compile as `celosia.compiler.compile.compile`, whose docstring it gets, with onnxruntime as oracle for
    `optimise`.

    This is `celosia.compile`: the compiler itself does not import onnxruntime.
    """
    if options.optimise is not None and options.oracle is None:
        require_onnxruntime()
        options = replace(options, oracle=open_model)
    return compile_model(source, **vars(options))


compile.__doc__ = compile_model.__doc__
