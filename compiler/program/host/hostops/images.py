"""ImageDecoder: PNG, BMP, PNM and TIFF that is not compressed; by Pillow JPEG, JPEG 2000 and WebP."""

from __future__ import annotations

import re
import struct
import zlib
from io import BytesIO

import numpy as np

from celosia.compiler.program.host.hostops.registry import Array, host
from celosia.compiler.program.host.op import HostOp


@host("ImageDecoder")
def image_decoder(op: HostOp, x: Array) -> Array:
    """[height, width, channels] uint8 of a file's bytes. HostError where it is none of these kinds."""
    data = x.tobytes()
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        image = _png(op, data)
    elif data.startswith(b"BM"):
        image = _bmp(op, data)
    elif data[:2] in (b"P5", b"P6"):
        image = _pnm(op, data)
    elif data[:4] in (b"II*\0", b"MM\0*"):
        image = _tiff(op, data)
    else:
        return _by_pillow(op, data)
    wanted = op.attr("pixel_format", "RGB")
    if wanted == "Grayscale":
        grey: Array = np.rint(image @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)
        return grey[..., None]
    return np.ascontiguousarray(image[..., ::-1]) if wanted == "BGR" else image


def _by_pillow(op: HostOp, data: bytes) -> Array:
    try:
        from PIL import Image
    except ImportError:
        raise op.fail("JPEG, JPEG 2000 and WebP are decoded by Pillow, which is missing: pip install pillow") from None
    wanted = op.attr("pixel_format", "RGB")
    try:
        picture = Image.open(BytesIO(data), formats=["JPEG", "JPEG2000", "WEBP"])
        pixels = np.asarray(picture.convert("L" if wanted == "Grayscale" else "RGB"))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        formats = "none of PNG, BMP, PNM, TIFF, JPEG, JPEG 2000 and WebP"
        raise op.fail(f"the format of the image is {formats}, or it is damaged or too large ({error})") from None
    return pixels[..., None] if wanted == "Grayscale" else pixels[..., ::-1] if wanted == "BGR" else pixels


def _rows(op: HostOp, data: bytes, shape: tuple[int, ...]) -> Array:
    size = int(np.prod(shape))
    if len(data) < size:
        raise op.fail(f"the image has {len(data)} bytes of pixels where {size} are expected")
    return np.frombuffer(data, np.uint8, size).reshape(shape)


def _colours(op: HostOp, pixels: Array) -> Array:
    """[height, width, 3] of 1 (grey), 2 (with alpha), 3 or 4 channels."""
    channels = pixels.shape[2]
    return np.repeat(pixels[..., :1], 3, axis=2) if channels < 3 else pixels[..., :3].copy()


def _png(op: HostOp, data: bytes) -> Array:
    at, body, header = 8, b"", b""
    while at + 8 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        kind, chunk = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        header = chunk if kind == b"IHDR" else header
        body += chunk if kind == b"IDAT" else b""
        at += size + 12
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    channels = {0: 1, 2: 3, 4: 2, 6: 4}.get(colour)
    if depth != 8 or channels is None or interlaced:
        raise op.fail("a PNG image must have 8 bits for each channel, no palette and no interlacing")
    limit = height * (width * channels + 1)
    lines = _rows(op, zlib.decompressobj().decompress(body, limit), (height, width * channels + 1))
    out = np.zeros((height + 1, width * channels), np.uint8)
    for y, line in enumerate(lines):
        out[y + 1] = _unfiltered(op, int(line[0]), line[1:], out[y], channels)
    return _colours(op, out[1:].reshape(height, width, channels))


def _unfiltered(op: HostOp, kind: int, line: Array, above: Array, step: int) -> Array:
    """A line of a PNG image: each byte is the difference to a prediction from its left and upper neighbours."""
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


def _bmp(op: HostOp, data: bytes) -> Array:
    (start,) = struct.unpack_from("<I", data, 10)
    width, height, _, bits, packing = struct.unpack_from("<iiHHI", data, 18)
    if bits not in (24, 32) or packing:
        raise op.fail("a BMP image must have 24 or 32 bits for each pixel, not compressed")
    line = -(-width * bits // 32) * 4
    rows = _rows(op, data[start:], (abs(height), line))[:, : width * bits // 8].reshape(abs(height), width, bits // 8)
    return np.ascontiguousarray((rows[::-1] if height > 0 else rows)[..., 2::-1])


def _pnm(op: HostOp, data: bytes) -> Array:
    found = re.match(rb"P([56])(?:\s+|#[^\n]*\n)+(\d+)\s+(\d+)\s+255\s", data)
    if found is None:
        raise op.fail("a PNM image must be binary, with 8 bits for each channel")
    shape = (int(found[3]), int(found[2]), 3 if found[1] == b"6" else 1)
    return _colours(op, _rows(op, data[found.end() :], shape))


def _tiff(op: HostOp, data: bytes) -> Array:
    order = "<" if data[:2] == b"II" else ">"
    (at,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, at)
    tags: dict[int, tuple[int, ...]] = {}
    for number in range(count):
        tag, kind, length = struct.unpack_from(order + "HHI", data, at + 2 + 12 * number)
        if kind not in (3, 4):
            continue
        form = f"{order}{length}{'H' if kind == 3 else 'I'}"
        place = at + 10 + 12 * number
        if struct.calcsize(form) > 4:
            (place,) = struct.unpack_from(order + "I", data, place)
        tags[tag] = struct.unpack_from(form, data, place)
    if tags.get(259, (1,)) != (1,) or any(bits != 8 for bits in tags.get(258, (1,))) or tags.get(284, (1,)) != (1,):
        raise op.fail("a TIFF image must have 8 bits for each channel, not compressed, in one plane")
    pixels = b"".join(data[start : start + size] for start, size in zip(tags[273], tags[279]))
    return _colours(op, _rows(op, pixels, (tags[257][0], tags[256][0], tags.get(277, (1,))[0])))
