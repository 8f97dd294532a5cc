"""Train a small vision transformer on Fashion-MNIST, quantise it with `celosia.quantize`, and write the float model.

    python models/train_vit.py --epochs 6

Patches of 4×4 make 64 tokens of an image of `celosia.models.preprocess`, and a head has 16 channels: whole blocks of
`pynq`. Queries, keys and values have a product each, so that heads are views on the accelerator (docs/attention.md).
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import onnx
import typer
from rich.progress import track

import celosia
from celosia.models import PREPROCESSING, preprocess
from celosia.models.train_resnet8 import (
    CALIBRATION_IMAGES,
    CLASSES,
    Images,
    accuracy,
    augment,
    console,
    describe,
    ready,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTH, HEADS, LAYERS, PATCH, SIZE = 64, 4, 3, 4, 32
"""Channels, heads, encoder layers, and pixels along an edge of a patch and of an image."""


def vit() -> "nn.Module":
    """Three layers that normalise first: float32 [N, 1, 32, 32] to 10 logits, 106,000 parameters."""
    import torch
    from torch import nn

    class SelfAttention(nn.Module):  # type: ignore[misc]
        """Every token looks at all of its image."""

        def __init__(self) -> None:
            super().__init__()
            self.queries, self.keys, self.values, self.joined = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: "Tensor") -> "Tensor":
            split = (x.shape[0], x.shape[1], HEADS, WIDTH // HEADS)
            q, k, v = (part(x).reshape(split).transpose(1, 2) for part in (self.queries, self.keys, self.values))
            shares = (q @ k.transpose(2, 3) / (WIDTH // HEADS) ** 0.5).softmax(-1)
            return self.joined((shares @ v).transpose(1, 2).reshape(x.shape))

    class VitLayer(nn.Module):  # type: ignore[misc]
        """Attention and two products, each added to what it reads."""

        def __init__(self) -> None:
            super().__init__()
            feed = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
            self.attend = nn.Sequential(nn.LayerNorm(WIDTH), SelfAttention())
            self.feed = nn.Sequential(nn.LayerNorm(WIDTH), *feed)

        def forward(self, x: "Tensor") -> "Tensor":
            x = x + self.attend(x)
            return x + self.feed(x)

    class Vit(nn.Module):  # type: ignore[misc]
        """Patches, positions, layers; the mean of the tokens is classified."""

        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
            self.places = nn.Parameter(0.02 * torch.randn(1, (SIZE // PATCH) ** 2, WIDTH))
            self.layers, self.norm = nn.Sequential(*(VitLayer() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, images: "Tensor") -> "Tensor":
            x = self.layers(self.patches(images).flatten(2).transpose(1, 2) + self.places)
            return self.head(self.norm(x).mean(1))

    return Vit()


def train(images: Images, labels: Images, epochs: int, batch: int = 128) -> "nn.Module":
    """Train on images [N, 28, 28] with AdamW and a one-cycle learning rate; returns the network in evaluation mode."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(0)
    network = vit()
    steps = len(images) // batch
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=epochs * steps)
    for epoch in range(1, epochs + 1):
        total = 0.0
        order = torch.randperm(len(images)).numpy()
        for step in track(range(steps), f"epoch {epoch}/{epochs}", console=console):
            chosen = order[step * batch : (step + 1) * batch]
            inputs = augment(torch.from_numpy(preprocess(images[chosen])))
            loss = F.cross_entropy(network(inputs), torch.from_numpy(labels[chosen].astype(np.int64)))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        console.print(f"epoch {epoch}/{epochs}: training loss {total / steps:.3f}")
    return network.eval()


def export(network: "nn.Module", path: Path) -> None:
    """Write the float model for one image, `image` float32 [1, 1, 32, 32] to `logits` [1, 10]; without what the
    exporter notes of the sources, which is a third of it."""
    import torch

    image, names = torch.zeros(1, 1, SIZE, SIZE), {"input_names": ["image"], "output_names": ["logits"]}
    torch.onnx.export(network, (image,), path, dynamo=True, external_data=False, verbose=False, **names)
    model = onnx.load(path)
    graph = model.graph
    for noted in (model, graph, *graph.node, *graph.initializer, *graph.value_info, *graph.input, *graph.output):
        noted.ClearField("metadata_props")
    onnx.save(model, path)


def quantised(float_path: Path, int8_path: Path, images: Images) -> dict[str, Any]:
    """Write the int8 model, calibrated on images [N, 28, 28]; returns the report of `celosia.quantize`."""
    return celosia.quantize(float_path, {"image": preprocess(images)}, int8_path)


def main(
    data: Annotated[Path, typer.Option(help="Folder of the four Fashion-MNIST files.")] = Path(
        "/usr/share/datasets/fashion-mnist"
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 60,000 training images.")] = 6,
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")] = Path(__file__).parent,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of PyTorch.")] = 1,
) -> None:
    """Train a vision transformer on Fashion-MNIST, quantise it, print the accuracy of both models, and write
    vit_fashion.onnx, the float one."""
    (train_images, train_labels), (test_images, test_labels) = ready(data, threads, "train,torch")
    out.mkdir(parents=True, exist_ok=True)  # now, not after the training

    network = train(train_images, train_labels, epochs)
    float_path = out / "vit_fashion.onnx"
    with tempfile.TemporaryDirectory() as scratch:
        int8_path = Path(scratch) / "vit_fashion_int8.onnx"
        export(network, float_path)
        report = quantised(float_path, int8_path, train_images[:CALIBRATION_IMAGES])
        shares = [accuracy(path, test_images, test_labels) for path in (float_path, int8_path)]
    properties = {"preprocessing": PREPROCESSING, "classes": ", ".join(CLASSES)}
    describe(float_path, {**properties, "training": f"{epochs} epochs of Fashion-MNIST"})
    share = report["accelerator"]
    console.print(f"accuracy on {len(test_images):,} test images: float {shares[0]:.2%}, int8 {shares[1]:.2%}")
    console.print(f"{share['macs_accelerator']:,} of {share['macs_total']:,} products on the accelerator")


if __name__ == "__main__":
    typer.run(main)
