"""Find the roles of the inputs and outputs of a decoder by the names that exporters give them.

input_ids            int [1, steps]                 new tokens
attention_mask       int [1, total]                 1 for tokens that are seen; total = past + steps
position_ids         int [1, steps]                 positions of the new tokens, from 0; may be missing
past_key_values...   float [1, heads, past, size]   keys or values of each layer
logits               float [1, steps, vocabulary]   or of the last token only
present...           float [1, heads, total, size]  the past rows, followed by those of the new tokens
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import onnx

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.dimensions import input_values

CACHE_AXIS = 2
"""Axis of tokens in a cache."""


@dataclass(frozen=True)
class Cache:
    """A cache of keys or values of one layer, [batch, heads, tokens, size].

    past, present: names of its input and output. dtype: element type in the original model.
    """

    past: str
    present: str
    heads: int
    size: int
    dtype: str


@dataclass(frozen=True)
class Roles:
    """Names of a decoder's inputs and outputs by role. positions: "" where it has no such input."""

    tokens: str
    mask: str
    positions: str
    logits: str
    caches: tuple[Cache, ...]
    kinds: dict[str, str]
    """Element type of each input."""


def find_roles(proto: onnx.ModelProto) -> Roles:
    """Find the roles of the inputs and outputs of `proto`. ModelError, with the missing role, where it is no such
    decoder."""
    inputs = input_values(proto)
    pairs = _cache_pairs(proto)
    if not pairs:
        raise ModelError(
            "the model has no cache, which is inputs named past... and outputs named present...; export it with its "
            "cache, as optimum does for text-generation-with-past"
        )
    past_names = {past for past, _ in pairs}
    outputs = {value.name: value for value in proto.graph.output}
    kinds = {name: _element_type(value) for name, value in inputs.items()}
    ids = [name for name, kind in kinds.items() if name not in past_names and kind.startswith(("int", "bool"))]
    masks = [name for name in ids if "mask" in name.lower()]
    positions = [name for name in ids if "position" in name.lower()]
    tokens = [name for name in ids if name not in (*masks, *positions)]
    if len(masks) != 1:
        raise ModelError(
            f"the model needs one input for the mask of the tokens that are seen, and has {_names_text(masks)}; "
            "without it a cache of fixed length cannot be told from tokens: export it with attention_mask"
        )
    if len(tokens) != 1 or len(positions) > 1:
        raise ModelError(
            f"the model needs one input of tokens and one of positions, and has {_names_text(tokens)} and "
            f"{_names_text(positions)}"
        )
    other_inputs = [name for name in inputs if name not in (*past_names, *tokens, *masks, *positions)]
    if other_inputs:
        raise ModelError(f"input {other_inputs[0]!r} is none of tokens, mask, positions and cache of a decoder")
    present = {name for _, name in pairs}
    logits = [name for name in outputs if name not in present]
    logits = [name for name in logits if "logits" in name.lower()] or logits
    if len(logits) != 1:
        raise ModelError(f"the model needs one output of logits, and has {_names_text(logits)}")
    caches = tuple(_describe_cache(inputs[past], present) for past, present in pairs)
    return Roles(tokens[0], masks[0], (*positions, "")[0], logits[0], caches, kinds)


def _cache_pairs(proto: onnx.ModelProto) -> list[tuple[str, str]]:
    """Return the names of each cache's input and output, matched by layer and kind."""
    present_names = {
        _layer_and_kind(value.name, "present"): value.name for value in proto.graph.output if "present" in value.name
    }
    past_names = [name for name in input_values(proto) if "past" in name.lower()]
    return [
        (name, present_names[key]) for name in past_names if (key := _layer_and_kind(name, "past")) in present_names
    ]


def _layer_and_kind(name: str, kind: str) -> tuple[str, ...]:
    """Return the words and numbers of a cache's name that tell layer and key or value, without `kind` ("past",
    "present").

    >>> _layer_and_kind("past_key_values.3.key", "past") == _layer_and_kind("present.3.key", "present")
    True
    """
    distinct_part = name.lower().replace("key_values", "").replace(kind, "")
    return tuple(re.findall(r"[a-z]+|\d+", distinct_part))


def _describe_cache(value: onnx.ValueInfoProto, present: str) -> Cache:
    """Return the Cache of an input and its output. ModelError where its shape is not [batch, heads, tokens, size]."""
    dims = value.type.tensor_type.shape.dim
    if len(dims) != 4 or not all(dims[axis].dim_value > 0 for axis in (1, 3)):
        shown = ", ".join(dim.dim_param or str(dim.dim_value) for dim in dims)
        raise ModelError(
            f"cache {value.name!r} is [{shown}]; it must be [batch, heads, tokens, size] with given heads and size"
        )
    return Cache(value.name, present, dims[1].dim_value, dims[3].dim_value, _element_type(value))


def _element_type(value: onnx.ValueInfoProto) -> str:
    """Return numpy's name of a tensor's element type; "" where it declares none."""
    kind = value.type.tensor_type.elem_type
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)).name if kind else ""


def _names_text(names: list[str]) -> str:
    """Return names as text for errors."""
    return ", ".join(map(repr, names)) or "none"
