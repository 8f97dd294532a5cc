"""Operators that prepare the inputs of a network: images, signals and texts.

Its parts, in order: ImageDecoder (PNG, BMP, PNM and uncompressed TIFF; JPEG, JPEG 2000 and WebP by Pillow); Fourier
transforms and mel filters; strings, which are object arrays of Python str; n-grams; labels.
"""

from __future__ import annotations

import re
import struct
import zlib
from io import BytesIO

import numpy as np

from celosia.compiler.program.host.op import Array, HostOp, check_size, host, numpy_type


@host("ImageDecoder")
def image_decoder(op: HostOp, x: Array) -> Array:
    """Decode the bytes of an image file to [height, width, channels] uint8. Raises HostError for unknown formats."""
    data = x.tobytes()
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        image = _decode_png(op, data)
    elif data.startswith(b"BM"):
        image = _decode_bmp(op, data)
    elif data[:2] in (b"P5", b"P6"):
        image = _decode_pnm(op, data)
    elif data[:4] in (b"II*\0", b"MM\0*"):
        image = _decode_tiff(op, data)
    else:
        return _decode_by_pillow(op, data)
    pixel_format = op.attr("pixel_format", "RGB")
    if pixel_format == "Grayscale":
        grey: Array = np.rint(image @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)
        return grey[..., None]
    return np.ascontiguousarray(image[..., ::-1]) if pixel_format == "BGR" else image


def _decode_by_pillow(op: HostOp, data: bytes) -> Array:
    """Decode JPEG, JPEG 2000 or WebP. Raises HostError without Pillow, or where the bytes are none of these."""
    try:
        from PIL import Image
    except ImportError:
        raise op.fail("JPEG, JPEG 2000 and WebP are decoded by Pillow, which is missing: pip install pillow") from None
    pixel_format = op.attr("pixel_format", "RGB")
    try:
        picture = Image.open(BytesIO(data), formats=["JPEG", "JPEG2000", "WEBP"])
        pixels = np.asarray(picture.convert("L" if pixel_format == "Grayscale" else "RGB"))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        formats = "none of PNG, BMP, PNM, TIFF, JPEG, JPEG 2000 and WebP"
        raise op.fail(f"the format of the image is {formats}, or it is damaged or too large ({error})") from None
    return pixels[..., None] if pixel_format == "Grayscale" else pixels[..., ::-1] if pixel_format == "BGR" else pixels


def _as_pixels(op: HostOp, data: bytes, shape: tuple[int, ...]) -> Array:
    """Return bytes as a uint8 array of this shape. Raises HostError where there are too few."""
    size = int(np.prod(shape))
    if len(data) < size:
        raise op.fail(f"the image has {len(data)} bytes of pixels where {size} are expected")
    return np.frombuffer(data, np.uint8, size).reshape(shape)


def _to_rgb(op: HostOp, pixels: Array) -> Array:
    """Convert pixels of 1 (grey), 2 (grey and alpha), 3 or 4 (alpha) channels to [height, width, 3], without alpha."""
    channels = pixels.shape[2]
    return np.repeat(pixels[..., :1], 3, axis=2) if channels < 3 else pixels[..., :3].copy()


def _decode_png(op: HostOp, data: bytes) -> Array:
    """Decode a PNG file with 8 bits a channel, without palette and interlacing."""
    offset, body, header = 8, b"", b""
    while offset + 8 <= len(data):
        (size,) = struct.unpack_from(">I", data, offset)
        kind, chunk = data[offset + 4 : offset + 8], data[offset + 8 : offset + 8 + size]
        header = chunk if kind == b"IHDR" else header
        body += chunk if kind == b"IDAT" else b""
        offset += size + 12
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    channels = {0: 1, 2: 3, 4: 2, 6: 4}.get(colour)
    if depth != 8 or channels is None or interlaced:
        raise op.fail("a PNG image must have 8 bits for each channel, no palette and no interlacing")
    limit = height * (width * channels + 1)
    lines = _as_pixels(op, zlib.decompressobj().decompress(body, limit), (height, width * channels + 1))
    out = np.zeros((height + 1, width * channels), np.uint8)
    for y, line in enumerate(lines):
        out[y + 1] = _unfilter_png_line(op, int(line[0]), line[1:], out[y], channels)
    return _to_rgb(op, out[1:].reshape(height, width, channels))


def _unfilter_png_line(op: HostOp, kind: int, line: Array, above: Array, step: int) -> Array:
    """Restore a line of a PNG image, whose bytes are differences to a prediction from left and upper neighbours.

    kind: number of the filter. above: the restored line before it. step: bytes of a pixel.
    """
    if kind == 0:
        return line
    if kind == 2:
        return line + above
    if kind > 4:
        raise op.fail(f"there is no PNG filter {kind}")
    row = [0] * step + line.tolist()
    upper = [0] * step + above.tolist()
    for i in range(step, len(row)):
        left, up, corner = row[i - step], upper[i], upper[i - step]
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + up) // 2
        else:
            base = left + up - corner
            guess = min((abs(base - left), 0, left), (abs(base - up), 1, up), (abs(base - corner), 2, corner))[2]
        row[i] = (row[i] + guess) & 255
    return np.array(row[step:], np.uint8)


def _decode_bmp(op: HostOp, data: bytes) -> Array:
    """Decode an uncompressed BMP file with 24 or 32 bits a pixel."""
    (start,) = struct.unpack_from("<I", data, 10)
    width, height, _, bits, packing = struct.unpack_from("<iiHHI", data, 18)
    if bits not in (24, 32) or packing:
        raise op.fail("a BMP image must have 24 or 32 bits for each pixel, not compressed")
    line = -(-width * bits // 32) * 4
    rows = _as_pixels(op, data[start:], (abs(height), line))[:, : width * bits // 8].reshape(
        abs(height), width, bits // 8
    )
    return np.ascontiguousarray((rows[::-1] if height > 0 else rows)[..., 2::-1])


def _decode_pnm(op: HostOp, data: bytes) -> Array:
    """Decode a binary PGM or PPM file with 8 bits a channel."""
    header = re.match(rb"P([56])(?:\s+|#[^\n]*\n)+(\d+)\s+(\d+)\s+255\s", data)
    if header is None:
        raise op.fail("a PNM image must be binary, with 8 bits for each channel")
    shape = (int(header[3]), int(header[2]), 3 if header[1] == b"6" else 1)
    return _to_rgb(op, _as_pixels(op, data[header.end() :], shape))


def _decode_tiff(op: HostOp, data: bytes) -> Array:
    """Decode an uncompressed TIFF file with 8 bits a channel in one plane."""
    order = "<" if data[:2] == b"II" else ">"
    (directory,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, directory)
    tags: dict[int, tuple[int, ...]] = {}
    for entry in range(count):
        tag, kind, length = struct.unpack_from(order + "HHI", data, directory + 2 + 12 * entry)
        if kind not in (3, 4):
            continue
        form = f"{order}{length}{'H' if kind == 3 else 'I'}"
        offset = directory + 10 + 12 * entry
        if struct.calcsize(form) > 4:
            (offset,) = struct.unpack_from(order + "I", data, offset)
        tags[tag] = struct.unpack_from(form, data, offset)
    if tags.get(259, (1,)) != (1,) or any(bits != 8 for bits in tags.get(258, (1,))) or tags.get(284, (1,)) != (1,):
        raise op.fail("a TIFF image must have 8 bits for each channel, not compressed, in one plane")
    pixels = b"".join(data[start : start + size] for start, size in zip(tags[273], tags[279]))
    return _to_rgb(op, _as_pixels(op, pixels, (tags[257][0], tags[256][0], tags.get(277, (1,))[0])))


def _to_complex(x: Array) -> Array:
    """Convert [..., 1] (real) or [..., 2] (real and imaginary part) to real or complex numbers [...]."""
    return x[..., 0] + 1j * x[..., 1] if x.shape[-1] == 2 else x[..., 0]


def _from_complex(x: Array, kind: np.dtype[np.float32]) -> Array:
    """Convert complex numbers [...] to real and imaginary parts [..., 2] of type `kind`."""
    return np.stack([x.real, x.imag], axis=-1).astype(kind)


@host("DFT")
def dft(op: HostOp, x: Array, length: Array | None = None, axis: Array | None = None) -> Array:
    """Compute the discrete Fourier transform: [..., 2], or [..., 1] for the inverse of half a spectrum.

    Raises HostError where memory does not suffice.
    """
    along = op.attr("axis", 1) if axis is None else int(axis.reshape(-1)[0])
    if axis is None and op.opset >= 20:
        along = -2
    along = along % x.ndim
    values = _to_complex(x)
    one_sided, inverse = op.attr("onesided", 0), op.attr("inverse", 0)
    count = None if length is None else int(length.reshape(-1)[0])
    if count is not None:
        numbers = values.size // max(values.shape[along], 1) * count
        check_size(numbers * np.dtype(np.complex128).itemsize, f"{op.label}: its output")
    if one_sided and inverse:
        return np.fft.irfft(values, count, along)[..., None].astype(x.dtype)
    run = np.fft.rfft if one_sided else np.fft.ifft if inverse else np.fft.fft
    if one_sided:
        values = values.real
    return _from_complex(run(values, count, along), x.dtype)


@host("STFT")
def stft(op: HostOp, x: Array, step: Array, window: Array | None = None, length: Array | None = None) -> Array:
    """Compute the short-time Fourier transform: [batch, frames, frequencies, 2]."""
    values = x if x.ndim == 2 else _to_complex(x)
    size = int(length.reshape(-1)[0]) if length is not None else len(window) if window is not None else values.shape[1]
    shape = np.ones(size, x.dtype) if window is None else window
    frames = np.lib.stride_tricks.sliding_window_view(values, size, axis=1)[:, :: int(step.reshape(-1)[0])]
    run = np.fft.rfft if op.attr("onesided", 1) else np.fft.fft
    return _from_complex(run(frames * shape, axis=-1), x.dtype)


@host("MelWeightMatrix")
def mel_weights(op: HostOp, bins: Array, length: Array, rate: Array, low: Array, high: Array) -> Array:
    """Compute mel filters: [length // 2 + 1, bins] triangles of equal width on the mel scale."""
    count, half = int(bins), int(length) // 2 + 1
    check_size(half * count * np.dtype(np.complex128).itemsize, f"{op.label}: its output")
    mels = [2595 * np.log10(1 + float(edge) / 700) for edge in (low, high)]
    edges = mels[0] + np.arange(count + 2) * ((mels[1] - mels[0]) / (count + 2))
    hertz = 700 * (10 ** (edges / 2595) - 1)
    edge_bins = ((int(length) + 1) * hertz // int(rate)).astype(np.int64)
    out = np.zeros((half, count))
    for i in range(count):
        left, middle, right = edge_bins[i : i + 3]
        if middle == left:
            out[middle, i] = 1
        else:
            for j in range(left, middle + 1):
                out[j, i] = (j - left) / (middle - left)
        for j in range(middle, right):
            out[j, i] = (right - j) / (right - middle)
    return out.astype(numpy_type(op.attr("output_datatype", 1)))


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
