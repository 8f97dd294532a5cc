"""Fourier transforms and mel filters."""

from __future__ import annotations

import numpy as np

from celosia.compiler.program.host.hostops.host_registry import Array, host, numpy_type
from celosia.compiler.program.host.op import HostOp, check_size


def _to_complex(x: Array) -> Array:
    """Convert [..., 1] (real) or [..., 2] (real and imaginary part) to real or complex numbers [...]."""
    return x[..., 0] + 1j * x[..., 1] if x.shape[-1] == 2 else x[..., 0]


def _from_complex(x: Array, kind: np.dtype[np.float32]) -> Array:
    """Convert complex numbers [...] to real and imaginary parts [..., 2] of type `kind`."""
    return np.stack([x.real, x.imag], axis=-1).astype(kind)


def _check_size(op: HostOp, count: int) -> None:
    """Raise HostError where memory does not suffice for `count` complex numbers."""
    check_size(count * np.dtype(np.complex128).itemsize, f"{op.label}: its output")


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
        _check_size(op, values.size // max(values.shape[along], 1) * count)
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
    _check_size(op, half * count)
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
