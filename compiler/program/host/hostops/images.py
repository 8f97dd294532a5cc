"""ImageDecoder: PNG, BMP, PNM and uncompressed TIFF; JPEG, JPEG 2000 and WebP by Pillow."""

from __future__ import annotations

import re
import struct
import zlib
from io import BytesIO

import numpy as np

from celosia.compiler.program.host.hostops.host_registry import Array, host
from celosia.compiler.program.host.op import HostOp


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
