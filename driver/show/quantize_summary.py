"""Summary of a quantised model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from celosia.driver.show.text_table import add_row, new_table, percent


def quantised(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield a summary of `quantize`'s report: errors, operators, the accelerator's share."""
    sample_text = "held out of the calibration" if report["held_out"] else "the calibration's own"
    samples = f"{report['samples_measured']} samples ({sample_text})"
    yield _error_table(f"Against the float model, {samples}", report["outputs"])
    if (four := report["four_bits"]) is not None:
        yield _error_table("The same with weights of 8 bits", report["outputs_with_int8_weights"])
        sqnr = "" if four["sqnr_db"] is None else f"; together {four['sqnr_db']:.1f} dB above their error"
        yield Text(f"{four['matrices']} matrices of weights have {report['weights']} bits{sqnr}.")
    if (smoothed := report["smooth"]) is not None:
        yield _error_table("The same without smoothing", report["outputs_without_smoothing"])
        yield Text(f"{len(smoothed['changed'])} of {smoothed['places']} places where it is possible are smoothed.")
    if (products := report["outputs_with_products"]) is not None:
        yield _error_table("The same with products in bytes, and nothing else", products)
    if report["advice"]:
        yield from _explain_poor_layers(report)
    operators = report["operators"]
    quantised_count = sum(row["quantised"] for row in operators)
    table = new_table(
        f"{quantised_count} of {len(operators)} operators quantised", "operator", ">quantised", ">not", "why not"
    )
    for op in sorted({row["op"] for row in operators}):
        rows = [row for row in operators if row["op"] == op]
        not_quantised = [row for row in rows if not row["quantised"]]
        reasons = "; ".join(sorted({row["reason"] for row in not_quantised}))
        add_row(table, op, len(rows) - len(not_quantised), len(not_quantised), reasons)
    yield table
    yield from _placement_tables(report["accelerator"])


def _error_table(title: str, outputs: list[dict[str, Any]]) -> RenderableType:
    """Return a table of the errors of outputs."""
    has_perplexity = any(row["perplexity"] for row in outputs)
    perplexity_columns = (">perplexity float", ">int8") if has_perplexity else ()
    errors = new_table(
        title, "output", ">largest", ">max error", ">mean error", ">SQNR dB", ">top-1 agreement", *perplexity_columns
    )
    for row in outputs:
        numbers = [f"{row[key]:.4g}" for key in ("largest", "max_abs", "mean_abs")]
        sqnr = "-" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}"
        add_row(errors, row["name"], *numbers, sqnr, percent(row["top1_agreement"]),
                *(_perplexity_cells(row) if has_perplexity else ()))  # fmt: skip
    return errors


def _perplexity_cells(row: dict[str, Any]) -> list[str]:
    """Return the perplexity of the float and of the int8 model, as cells of an output's row."""
    perplexity = row["perplexity"] or {}
    return ["-" if perplexity.get(key) is None else f"{perplexity[key]:.4g}" for key in ("float", "int8")]


def _explain_poor_layers(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield a table of the layers that lose most, and advice, for a model far from the float one."""
    if report["losing"]:
        table = new_table("Layers that lose most, of one sample", "operator", "name", ">SQNR dB", ">lost dB")
        for row in report["losing"]:
            add_row(table, row["op"], row["name"], f"{row['sqnr_db']:.1f}", f"{row['lost_db']:.1f}")
        yield table
    tries = "".join(f"\n  {number}. {advice}" for number, advice in enumerate(report["advice"], 1))
    yield Text(f"The int8 model is far from the float one. What to try, one after the other:{tries}")


def _placement_tables(accelerator: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield tables of the accelerator's share, and of operators on the CPU."""
    if "error" in accelerator:
        yield Text(f"It does not compile for {accelerator['config']}: {accelerator['error']}")
        return
    total, on_accelerator = accelerator["macs_total"], accelerator["macs_accelerator"]
    share = percent(on_accelerator / total) if total else "-"
    yield Text(f"Config {accelerator['config']} takes {share} of {total:,} multiply-accumulates.")
    if accelerator["cpu"]:
        table = new_table("Left on the CPU", "operator", ">count", "reason")
        for row in accelerator["cpu"]:
            add_row(table, row["op"], row["count"], row["reason"])
        yield table
