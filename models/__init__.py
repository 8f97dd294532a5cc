"""The demo model, ResNet-8 trained on Fashion-MNIST, and 100 test images for it; the demo decoder, a small GPT; a
vision transformer in floats.

train_resnet8.py, train_gpt.py and train_vit.py make these files; README.md gives the accuracy and the commands.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PREPROCESSING = "pad 28x28 to 32x32 with 2 zeros on each side, divide by 255, one channel"


def preprocess(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Turn grey images into the input of the model: PREPROCESSING.

    images: [N, 28, 28], 0 is background. Returns [N, 1, 32, 32] in 0...1. ValueError for another shape or type.

    >>> preprocess(np.full((2, 28, 28), 255, np.uint8))[1, 0, 1:3, 16]
    array([0., 1.], dtype=float32)
    """
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28):
        raise ValueError(f"images must be uint8 [N, 28, 28], not {images.dtype} {list(images.shape)}")
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    return padded[:, None].astype(np.float32) / np.float32(255)


def demo_model_path() -> Path:
    """The int8 ONNX model. Input `image`: float32 [1, 1, 32, 32]; output `logits`: float32 [1, 10]."""
    return Path(str(files(__package__) / "resnet8_fashion_int8.onnx"))


def gpt_path() -> Path:
    """The int8 decoder: characters of Python's help topics, 4 layers of 4 heads, a context of 128.

    Inputs: `input_ids` and `position_ids` int64 [1, steps], `attention_mask` int64 [1, total], and for each layer i
    `past_key_values.{i}.key` and `.value` float32 [1, 4, past, 32]; steps, past and total = past + steps are open.
    Outputs: `logits` float32 [1, steps, vocabulary], `present.{i}.key` and `.value` float32 [1, 4, total, 32]: the
    past's rows and the new ones below. New row i sees column j where j <= past + i and the mask has a 1. `vocabulary`
    in the file's metadata is a JSON list of the characters that tokens stand for.
    """
    return Path(str(files(__package__) / "gpt_topics_int8.onnx"))


def vit_path() -> Path:
    """The float vision transformer. Input `image`: float32 [1, 1, 32, 32]; output `logits`: float32 [1, 10]."""
    return Path(str(files(__package__) / "vit_fashion.onnx"))


def demo_images() -> tuple[NDArray[np.float32], NDArray[np.uint8], list[str]]:
    """The first 100 test images of Fashion-MNIST.

    Returns the preprocessed images [100, 1, 32, 32], their labels [100] in 0...9 and the 10 class names.

    >>> images, labels, classes = demo_images()
    >>> images.shape, classes[labels[0]]
    ((100, 1, 32, 32), 'Ankle boot')
    """
    with np.load(Path(str(files(__package__) / "fashion_test.npz"))) as file:
        arrays: dict[str, NDArray[Any]] = dict(file)
    return preprocess(arrays["images"]), arrays["labels"], [str(name) for name in arrays["classes"]]
