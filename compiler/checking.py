"""Self-check a compiled model: compare its launches with the graph, and the graph with the imported model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import onnx_ir as ir

from celosia.compiler.frontend import PreparedModel
from celosia.compiler.lowering import Lowered
from celosia.compiler.program import Program
from celosia.compiler.selfcheck.check_launches import CheckFailed, SelfCheckError, self_check
from celosia.compiler.selfcheck.check_rewriting import RewriteError, check_pass, check_rewriting, units_of

__all__ = ["CheckFailed", "check_program"]


def check_program(
    program: Program, prepared: PreparedModel, lowered: Lowered, import_again: Callable[[], ir.Model]
) -> CheckFailed | None:
    """Compare a Program with the graph that it was made from, and that graph with the imported model.

    import_again: imports the model once more. If the graph is wrong, the passes run again on that, to name the wrong
    one.

    Raises SelfCheckError if two of them differ. Returns CheckFailed if the check itself ends in an error, which says
    nothing about the Program; None if all is equal.
    """
    assert prepared.original is not None
    graph, original = prepared.graph.graph, prepared.original
    try:
        checked = self_check(program, lowered.launches, lowered.partition, lowered.image.addresses)
        units = units_of(program, graph, lowered.partition, checked.computed)
        check_rewriting(original, units, program.constants, checked.held)
    except RewriteError:
        with suppress(CheckFailed):
            prepared.pipeline.run(import_again(), lambda name, model: check_pass(original, name, model))
        raise
    except (SelfCheckError, MemoryError):
        raise
    except CheckFailed as error:
        return error
    except Exception as error:
        failure = CheckFailed(error)
        failure.__cause__ = error
        return failure
    return None
