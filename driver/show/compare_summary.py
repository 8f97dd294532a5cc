"""Summary of a model compared with onnxruntime: its tensors (`compare`), or its accuracy and speed (`eval`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from celosia.driver.show.text_table import TOP_LAYERS, add_row, new_table, percent


def comparison(report: dict[str, Any], every: bool = False) -> Iterator[RenderableType]:
    """Yield a summary of `compare`: sentences, and a table of tensors.

    every: the table has all tensors, else those that differ, or lose most against the float model.
    """
    rows = report["tensors"]
    yield Text(
        f"{len(rows)} tensors compared with onnxruntime {report['oracle']} (session.qdqisint8allowed=1), "
        f"{report['different']} differ; {len(report['inside'])} exist inside fused operators only."
    )
    if rounded := report["rounded"]:
        yield Text(
            f"Rounded correctly: {rounded['apart']:,} of {rounded['values']:,} values of normalisations, and "
            f"{rounded['sums']:,} of sums, averages and products, lie a step beside onnxruntime's on the same bytes; "
            f"{rounded['behind']} tensors computed from these have other values."
        )
        if between := rounded.get("between"):
            worst = max(rows, key=lambda row: row["largest"] if np.issubdtype(row["dtype"], np.integer) else 0)
            yield Text(
                f"Floats between quantised tensors are bytes, so {between} tensors have other values: at most "
                f"{worst['largest']:g} steps apart ({worst['name']})."
            )
    if report["first"] is not None:
        yield Text(f"The first that differs though its operands do not: {_describe_difference(report)}")
    if report["unmatched"] is not None:
        yield from _describe_matching(report)
    shown = rows if every else [row for row in rows if row["differs"]][:TOP_LAYERS]
    if not shown and report["float_model"] is not None:
        losing = sorted((row for row in rows if row["lost_db"] is not None), key=lambda row: -row["lost_db"])
        shown = losing[:TOP_LAYERS]
    if not shown:
        return
    title = "Tensors" if every else "Tensors that differ" if report["different"] else "Tensors that lose most"
    count_text = f", {len(shown)} of {len(rows)} (all: --all)" if len(shown) < len(rows) else ""
    has_float = report["float_model"] is not None
    to_float = (">SQNR dB", ">lost dB") if has_float else ()
    table = new_table(title + count_text, "tensor", "made by", "type", ">different", ">largest", *to_float)
    for row in shown:
        decibels = ("-" if row[key] is None else f"{row[key]:.1f}" for key in ("sqnr_db", "lost_db"))
        largest = "-" if row["largest"] is None else f"{row['largest']:.3g}"
        cells = row["name"], row["op"], f"{row['dtype']}{row['shape']}", row["different"], largest
        add_row(table, *cells, *(decibels if has_float else ()))
    yield table
    if has_float:
        yield Text("different, largest: compared with onnxruntime. SQNR, lost: compared with the float model.")


def _describe_matching(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield a sentence on how tensors of the float model were matched, where not all of them were matched by name."""
    methods = Counter(row["matched"] for row in report["tensors"] if row["matched"])
    if methods and set(methods) != {"name"}:
        summary = ", ".join(
            f"{methods[method]} by {method}" for method in ("name", "structure", "order") if methods[method]
        )
        yield Text(f"Tensors of the float model: {summary} (--report names each).")
    for model, label in (("model", "the model"), ("float", "the float model")):
        if names := report["unmatched"][model]:
            omitted = f", and {len(names) - TOP_LAYERS} more" if len(names) > TOP_LAYERS else ""
            yield Text(f"Tensors of {label} that match none: {', '.join(names[:TOP_LAYERS])}{omitted}")


def _describe_difference(report: dict[str, Any]) -> str:
    """Describe the first element of the first tensor that differs from onnxruntime's."""
    row = next(row for row in report["tensors"] if row["name"] == report["first"])
    index, actual, expected = row["first"]
    tensor_text = f"{row['name']} ({row['op']} {row['node']})"
    if index is None:
        return f"{tensor_text} is {row['dtype']}{row['shape']}, onnxruntime's is {expected}"
    return f"{tensor_text}{index} is {actual}, onnxruntime's is {expected}"


def evaluation(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield a summary of `evaluate`: accuracy, speed, agreement with onnxruntime."""
    reference = report["against"]
    table = new_table(f"{report['samples']:,} samples", "", ">top-1", ">top-5", ">images a second", ">cycles an image")
    cycles = "-" if report["cycles"] is None else f"{report['cycles']:,.0f}"
    device_text = f"{report['config']['name'] or 'accelerator'}, {report['device']}"
    rows = [(device_text, report, cycles)]
    if reference is not None:
        rows.append((f"onnxruntime {reference['onnxruntime']}", reference, "-"))
    for name, row, spent in rows:
        add_row(table, name, percent(row["top1"]), percent(row["top5"]), f"{row['images_per_second']:,.1f}", spent)
    yield table
    if failed := report["failed"]:
        yield Text(
            f"Failed and left out: {len(failed)} of {report['samples'] + len(failed)} samples, such as {failed[0]}"
        )
    batch_text = f"{report['batch']} images at a time" if report["batch"] > 1 else "one image at a time"
    devices = f"{report['workers']} devices" if report["workers"] > 1 else "one device"
    yield Text(f"{batch_text} on {devices}, {report['seconds']:.2f} s; compiled in {report['compile_seconds']:.2f} s")
    if reference is not None:
        agreement = (
            "" if reference["top1_agreement"] is None else f"; top-1 agrees in {percent(reference['top1_agreement'])}"
        )
        yield Text(
            f"Samples whose output differs from onnxruntime's (session.qdqisint8allowed=1): {reference['differ']} of "
            f"{report['samples']}; bytes: {reference['bytes_different']:,} of {reference['bytes']:,}{agreement}"
        )
