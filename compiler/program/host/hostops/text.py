"""Operators on strings: object arrays of Python str."""

from __future__ import annotations

import re

import numpy as np

from celosia.compiler.program.host.hostops.host_registry import Array, host
from celosia.compiler.program.host.op import HostOp


@host("StringConcat")
def concat(op: HostOp, a: Array, b: Array) -> Array:
    """Concatenate element by element."""
    return np.asarray(np.add(a, b), object)


@host("StringSplit")
def split(op: HostOp, x: Array) -> tuple[Array, Array]:
    """Split each text. Returns the parts, padded with "", and their counts.

    Empty text has no parts. Without a delimiter, any number of spaces separates parts; tabs do not.
    """
    limit, delimiter = op.attr("maxsplit"), op.attr("delimiter")
    limit = -1 if limit is None else limit
    parts = [str(text).split(delimiter, limit) if delimiter and text else _words(str(text), limit)
             for text in x.reshape(-1)]  # fmt: skip
    counts = np.array([len(words) for words in parts], np.int64).reshape(x.shape)
    width = max(map(len, parts), default=0)
    table = np.full((len(parts), width), "", object)
    for row, words in zip(table, parts):
        row[: len(words)] = words
    return table.reshape(*x.shape, width), counts


def _words(text: str, limit: int) -> list[str]:
    """Split at spaces, at most `limit` times where that is not negative."""
    text = text.strip(" ")
    if not text or not limit:
        return [text] if text else []
    return re.split(" +", text, maxsplit=max(limit, 0))  # 0: as often as there are


@host("RegexFullMatch")
def full_match(op: HostOp, x: Array) -> Array:
    """Return for each element whether the pattern matches its complete text."""
    pattern = re.compile(op.attrs["pattern"])
    return np.array([pattern.fullmatch(str(text)) is not None for text in x.reshape(-1)], bool).reshape(x.shape)


@host("StringNormalizer")
def normalise(op: HostOp, x: Array) -> Array:
    """Change the case of words and remove stop words: [words] or [1, words]; [""] where none is left."""
    change = {"LOWER": str.lower, "UPPER": str.upper}.get(op.attr("case_change_action", "NONE"), str)
    sensitive = op.attr("is_case_sensitive", 0)
    key = str if sensitive else str.lower
    stop = {key(word) for word in op.attr("stopwords", [])}
    rows = [[change(text) for text in row if key(text) not in stop] for row in (x if x.ndim == 2 else [x])]
    rows = [row or [""] for row in rows]
    return np.array(rows if x.ndim == 2 else rows[0], object)


@host("TfIdfVectorizer")
def tf_idf(op: HostOp, x: Array) -> Array:
    """Count in each row the n-grams of a pool, weighted by the attribute `mode`.

    Up to max_skip_count words may be skipped between two words of an n-gram, always the same number.
    """
    words = op.attr("pool_int64s") or op.attr("pool_strings")
    starts, columns = op.attrs["ngram_counts"], op.attrs["ngram_indexes"]
    grams: dict[tuple[object, ...], int] = {}
    for n, (start, end) in enumerate(zip(starts, [*starts[1:], len(words)]), start=1):
        for position in range(start, end, n):
            grams[tuple(words[position : position + n])] = len(grams)
    weights = op.attr("weights") or [1.0] * len(columns)
    rows = x if x.ndim == 2 else x[None]
    counts = np.zeros((len(rows), max(columns) + 1), np.float32)
    mode = op.attrs["mode"]
    for row, out in zip(rows.tolist(), counts):
        for n in range(op.attrs["min_gram_length"], op.attrs["max_gram_length"] + 1):
            for step in range(1, 2 if n == 1 else op.attrs["max_skip_count"] + 2):
                for position in range(len(row) - (n - 1) * step):
                    gram = grams.get(tuple(row[position : position + n * step : step]))
                    if gram is not None:
                        out[columns[gram]] += 1
    scale = np.zeros(counts.shape[1], np.float32)
    scale[columns] = weights
    if mode == "IDF":
        counts = (counts > 0) * scale
    elif mode == "TFIDF":
        counts = counts * scale
    return counts.astype(np.float32) if x.ndim == 2 else counts[0].astype(np.float32)


@host("Equal")
def equal(op: HostOp, a: Array, b: Array) -> Array:
    """Compare element by element."""
    return np.asarray(a == b, bool)


@host("LabelEncoder", domain="ai.onnx.ml")
def label_encoder(op: HostOp, x: Array) -> Array:
    """Map each key to its value, or to the default. Raises HostError without keys or values."""

    def attribute(role: str) -> tuple[list[object], object]:
        """Return the list in the attributes `keys_*` or `values_*` (role: "keys" or "values"), and its element type."""
        for kind, dtype in (("int64s", np.int64), ("strings", object), ("floats", np.float32), ("tensor", None)):
            if f"{role}_{kind}" in op.attrs:
                values = op.attrs[f"{role}_{kind}"]
                return list(values), values.dtype if dtype is None else dtype
        raise op.fail(f"it has no {role}")

    keys, _ = attribute("keys")
    values, kind = attribute("values")
    default = {np.int64: op.attr("default_int64", -1), np.float32: op.attr("default_float", -0.0)}.get(kind)  # type: ignore[call-overload]
    if default is None:
        default = op.attr("default_string", "_Unused")
    if "default_tensor" in op.attrs:
        default = op.attrs["default_tensor"].reshape(-1)[0]
    nan = next((value for key, value in zip(keys, values) if key != key), default)
    table = dict(zip(keys, values))
    labels = [table.get(element, default) if element == element else nan for element in x.reshape(-1).tolist()]
    return np.array(labels, kind).reshape(x.shape)  # type: ignore[call-overload, no-any-return]
