"""Compute models with onnxruntime, as the reference for comparisons: int8 in integers, and every tensor inside."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx.shape_inference import infer_shapes

from celosia.compiler.graph.importer import read
from celosia.compiler.graph.onnxruntime_rules.low_precision import NARROW, in_bytes
from celosia.compiler.numerics import INT8
from celosia.compiler.program.dtypes import ONNX_TYPES
from celosia.plain import Sentence

Array = NDArray[Any]


class MissingLibrary(Sentence, RuntimeError):
    """A library is not installed; the message is one sentence that says how to install it."""


class OracleError(Sentence, ValueError):
    """onnxruntime does not run a model; the message is one sentence with its reason."""


def require_onnxruntime() -> None:
    """Raise MissingLibrary where onnxruntime is not installed."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        raise MissingLibrary("to compare, onnxruntime is needed: pip install onnxruntime") from None


def open_session(
    model: Path | onnx.ModelProto, level: str = "ALL", save: Path | None = None, threads: int = 0, int8: bool = True,
    without: Sequence[str] = (), exact: bool = True,
) -> Any:  # fmt: skip
    """Open an onnxruntime.InferenceSession of `model` on the CPU.

    level: of onnxruntime's optimisations: "ALL", "EXTENDED" (without its own layouts), "BASIC", "DISABLE_ALL". save:
    file for its optimised graph. threads: 0 for its own choice. int8: set the option INT8, and widen weights of fewer
    bits to bytes; False: leave both as in onnxruntime's defaults. without: names of optimisations to leave out.
    exact: set onnxruntime's option that keeps sums of products of uint8 by int8 from saturating on processors without
    VNNI. onnxruntime supports it only for models without int8 activations; the others do not saturate.
    Raises MissingLibrary, OracleError.
    """
    require_onnxruntime()
    import onnxruntime

    model = _drop_shared_names(_widen_narrow_integers(model) if int8 else model)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()

    def open_with(entries: dict[str, str]) -> Any:
        """Open the session with these configuration entries."""
        options = onnxruntime.SessionOptions()
        for name, value in entries.items():
            options.add_session_config_entry(name, value)
        level_name = f"ORT_{_LEVELS.get(level, level)}"
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level_name)
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        if save is not None:
            options.optimized_model_filepath = str(save)
        return onnxruntime.InferenceSession(
            source, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(without)
        )

    entries = {INT8: "1"} if int8 else {}
    if exact and adds_in_16_bits():
        with suppress(Exception):  # a model with int8 activations, for which it has no such kernels
            return open_with(entries | {EXACT: "1"})
    try:
        return open_with(entries)
    except Exception as error:  # onnxruntime raises many classes
        raise OracleError(f"onnxruntime cannot run the model: {_first_line(error)}") from None


EXACT = "session.x64quantprecision"
"""onnxruntime's setting that keeps sums of products of uint8 and int8 from saturating."""


@cache
def adds_in_16_bits() -> bool:
    """Return whether onnxruntime adds two products of uint8 and int8 in 16 bits, as on x86 without VNNI."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx2" in text and "vnni" not in text


_LEVELS = {level: f"ENABLE_{level}" for level in ("ALL", "EXTENDED", "BASIC")}
"""Names of onnxruntime's enum for the levels of `open_session`."""


def _widen_narrow_integers(model: Path | onnx.ModelProto) -> Path | onnx.ModelProto:
    """Return a model with its integers of fewer than 8 bits widened to bytes, so that onnxruntime computes in integers.

    A model without such integers is returned as it is.
    """
    proto = onnx.load(model, load_external_data=False) if isinstance(model, Path) else model
    if not any(tensor.data_type in FEW_BITS for tensor in _all_constants(proto.graph)):
        return model
    return in_bytes(read(model) if isinstance(model, Path) else model)


FEW_BITS = tuple(number for number, name in ONNX_TYPES.items() if name in NARROW)
"""ONNX' numbers of the types with fewer than 8 bits."""


def _all_constants(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the initialisers of a graph and its subgraphs, and the tensors in attributes of their nodes."""
    yield from graph.initializer
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        yield attribute.t
        yield from _all_constants(attribute.g)


def _drop_shared_names(model: Path | onnx.ModelProto) -> Path | onnx.ModelProto:
    """Return the model without names of nodes if two nodes share one, which ONNX allows and onnxruntime does not."""
    proto = onnx.load(model, load_external_data=False) if isinstance(model, Path) else model
    names = [node.name for node in proto.graph.node if node.name]
    if len(set(names)) == len(names):
        return model
    nameless = onnx.ModelProto()
    nameless.CopyFrom(read(model) if isinstance(model, Path) else model)
    for node in nameless.graph.node:
        node.name = ""
    return nameless


def version() -> str:
    """Return the version of onnxruntime."""
    import onnxruntime

    return str(onnxruntime.__version__)


def run_session(session: Any, feed: Mapping[str, Array]) -> dict[str, Array]:
    """Run a session with inputs by name, and return its outputs by name. OracleError."""
    try:
        return dict(zip((value.name for value in session.get_outputs()), session.run(None, dict(feed))))
    except Exception as error:  # onnxruntime raises many classes
        raise OracleError(f"onnxruntime cannot run the model: {_first_line(error)}") from None


def open_model(model: onnx.ModelProto) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """Return a function that computes the outputs of `model` by name, from inputs by name, under onnxruntime.

    Both this and the function raise OracleError; MissingLibrary. One thread only: the order in which onnxruntime adds
    floats depends on the number of threads.
    """
    return partial(run_session, open_session(model, threads=1))


def compute_tensors(
    model: Path | onnx.ModelProto, feed: Mapping[str, Array], optimised: bool = True
) -> dict[str, Array]:
    """Return every tensor that onnxruntime computes for `model`, by name.

    optimised: the tensors of the graph after onnxruntime's optimisations, in which quantised operators are integer
    operators; else those of the model as it is. Outputs are those of a usual session in both cases. Raises
    MissingLibrary, OracleError.
    """
    usual = open_session(model)
    graph = model if isinstance(model, onnx.ModelProto) else read(model)
    if optimised:
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "optimised.onnx"
            open_session(model, "EXTENDED", saved)
            graph = onnx.load(saved)
    return run_session(open_session(expose_tensors(graph), "DISABLE_ALL"), feed) | run_session(usual, feed)


def expose_tensors(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy `model` so that it returns every tensor but those of 4 bits or fewer, which onnxruntime cannot return."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    types = {value.name: value.type.tensor_type.elem_type for value in infer_shapes(model).graph.value_info}
    output_names = {value.name for value in copy.graph.output}
    names = [name for node in copy.graph.node for name in node.output if name and name not in output_names]
    returned = [name for name in names if types.get(name) not in FEW_BITS]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in returned)
    return copy


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text that is not empty, or the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def add_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """Add to `model` the types of tensors that ONNX's inference does not find, and return it.

    Such are the outputs of onnxruntime's own operators. Raises MissingLibrary, OracleError.
    """
    graph = infer_shapes(model).graph
    typed_names = {value.name for value in (*graph.value_info, *graph.input, *graph.output)}
    missing = [name for node in graph.node for name in node.output if name and name not in typed_names]
    if not missing:
        return model
    typed_graph = onnx.ModelProto()
    typed_graph.CopyFrom(model)
    typed_graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in missing)
    for value in open_session(typed_graph, "DISABLE_ALL").get_outputs():
        if value.name in missing and (kind := _ELEMENTS.get(value.type)) is not None:
            # onnxruntime says [] of a scalar, and also of a tensor whose rank it does not know.
            value_info = onnx.helper.make_tensor_value_info(value.name, kind, value.shape or None)
            model.graph.value_info.append(value_info)
    return model


_ELEMENTS = {
    f"tensor({name})": kind
    for name, kind in {
        "float": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16, "double": onnx.TensorProto.DOUBLE,
        "bool": onnx.TensorProto.BOOL, "int64": onnx.TensorProto.INT64, "int32": onnx.TensorProto.INT32,
        "int8": onnx.TensorProto.INT8, "uint8": onnx.TensorProto.UINT8,
    }.items()
}  # fmt: skip
"""ONNX' numbers of types by onnxruntime's names."""
