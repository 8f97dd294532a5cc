"""Train ResNet-8 of MLPerf Tiny on Fashion-MNIST, quantise it to int8, and write the demo model.

    python models/train_resnet8.py --epochs 15

The network is the one of MLPerf Tiny with one input channel instead of three: the images are grey, and copying the
one channel three times would add multiplications but no information. Its input is what `celosia.models.preprocess`
returns. Pixels 0...255 become 0...1, which the quantiser maps to -128...127: quantising the input loses nothing.
"""

import gzip
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import onnx
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from celosia.models import PREPROCESSING, preprocess

if TYPE_CHECKING:
    import onnxruntime as ort
    from torch import Tensor, nn

CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip
CALIBRATION_IMAGES = 1000
DEMO_IMAGES = 100

Images = NDArray[np.uint8]
console = Console()


# Data ---------------------------------------------------------------------------------------------------------------


def read_idx(path: Path) -> Images:
    """Read a gzipped IDX file of bytes, the format of MNIST. ValueError where it is not one."""
    content = gzip.decompress(path.read_bytes())
    zeros, kind, rank = content[:2], content[2], content[3]
    if zeros != b"\0\0" or kind != 8:
        raise ValueError(f"{path} is not an IDX file of bytes: it begins with {content[:4].hex()}")
    shape = np.frombuffer(content, ">u4", count=rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


def read_dataset(folder: Path, part: str) -> tuple[Images, Images]:
    """Images [N, 28, 28] and labels [N]; part is "train" (60,000) or "t10k" (10,000)."""
    return read_idx(folder / f"{part}-images-idx3-ubyte.gz"), read_idx(folder / f"{part}-labels-idx1-ubyte.gz")


# Network ------------------------------------------------------------------------------------------------------------


def resnet8() -> "nn.Module":
    """ResNet-8 of MLPerf Tiny: [N, 1, 32, 32] to 10 logits, 78,000 parameters."""
    from torch import nn
    from torch.nn import functional as F

    def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
        )

    class Block(nn.Module):  # type: ignore[misc]
        """Two 3x3 convolutions beside the identity, or beside a 1x1 convolution where the shape changes."""

        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.first = conv(inputs, outputs, 3, stride)
            self.second = conv(outputs, outputs, 3)
            self.shortcut = nn.Identity() if stride == 1 else conv(inputs, outputs, 1, stride)

        def forward(self, x: "Tensor") -> "Tensor":
            return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))

    return nn.Sequential(
        conv(1, 16, 3),
        nn.ReLU(),
        Block(16, 16, stride=1),
        Block(16, 32, stride=2),
        Block(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def augment(images: "Tensor") -> "Tensor":
    """Mirror half of the images [N, 1, 32, 32] and shift all of them by at most the 2 pixels of padding."""
    import torch

    down, right = torch.randint(-2, 3, (2,)).tolist()
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(mirrored, images.flip(3), images).roll((down, right), (2, 3))


def train(images: Images, labels: Images, epochs: int, batch: int = 128) -> "nn.Module":
    """Train on images [N, 28, 28] with a one-cycle learning rate; returns the network in evaluation mode."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(0)
    network = resnet8().to(memory_format=torch.channels_last)
    steps = len(images) // batch
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=epochs * steps)
    for epoch in range(1, epochs + 1):
        total = 0.0
        order = torch.randperm(len(images)).numpy()
        for step in track(range(steps), f"epoch {epoch}/{epochs}", console=console):
            chosen = order[step * batch : (step + 1) * batch]
            inputs = augment(torch.from_numpy(preprocess(images[chosen])))
            loss = F.cross_entropy(network(inputs), torch.from_numpy(labels[chosen].astype(np.int64)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        console.print(f"epoch {epoch}/{epochs}: training loss {total / steps:.3f}")
    return network.eval()


def export(network: "nn.Module", path: Path) -> None:
    """Write the float model for one image, each batch normalisation folded into the convolution before it.

    Written node by node, because PyTorch exports the pooling as ReduceMean, which onnxruntime has no integer kernel
    for. RuntimeError where onnxruntime and the network in evaluation mode give different logits.
    """
    import torch
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def add(op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(onnx.helper.make_node(op, inputs, [output], output, **attributes))
        return output

    def parameters(module: "nn.Module", name: str) -> list[str]:
        for key, value in module.named_parameters():
            constants.append(onnx.numpy_helper.from_array(value.detach().contiguous().numpy(), f"{name}.{key}"))
        return [f"{name}.weight", f"{name}.bias"]

    def conv(x: str, pair: "nn.Module", name: str) -> str:
        folded = fuse_conv_bn_eval(pair[0], pair[1])
        (kernel, _), (pad, _), strides = folded.kernel_size, folded.padding, folded.stride
        inputs = [x, *parameters(folded, name)]
        return add("Conv", inputs, name, kernel_shape=[kernel] * 2, pads=[pad] * 4, strides=strides)

    def block(x: str, module: "nn.Module", name: str) -> str:
        inner = add("Relu", [conv(x, module.first, f"{name}.first")], f"{name}.relu")
        second = conv(inner, module.second, f"{name}.second")
        shortcut = conv(x, module.shortcut, f"{name}.shortcut") if len(list(module.shortcut.parameters())) else x
        return add("Relu", [add("Add", [shortcut, second], f"{name}.add")], f"{name}.out")

    stem, _, *blocks, _, _, dense = network
    x = add("Relu", [conv("image", stem, "stem")], "stem.relu")
    for number, module in enumerate(blocks, 1):
        x = block(x, module, f"block{number}")
    x = add("Flatten", [add("GlobalAveragePool", [x], "pool")], "features")
    add("Gemm", [x, *parameters(dense, "dense")], "logits", transB=1)

    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "resnet8",
        [value("image", onnx.TensorProto.FLOAT, [1, 1, 32, 32])],
        [value("logits", onnx.TensorProto.FLOAT, [1, 10])],
        constants,
    )
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model_gen_version(graph, opset_imports=[opset], producer_name="celosia"), path)

    image = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    found, expected = session(path).run(None, {"image": image.numpy()})[0], network(image).detach().numpy()
    if not np.allclose(found, expected, atol=1e-3):
        raise RuntimeError(f"{path} gives {found}, PyTorch gives {expected}")


def quantise(float_path: Path, int8_path: Path, images: Images) -> None:
    """Write the model with int8 QuantizeLinear/DequantizeLinear pairs, calibrated on images [N, 28, 28].

    Weights are symmetric with a scale for each output channel, activations asymmetric.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.inputs: Iterator[dict[str, Any]] = ({"image": image[None]} for image in preprocess(images))

        def get_next(self) -> dict[str, Any] | None:
            return next(self.inputs, None)

    logging.disable(logging.WARNING)  # it asks for the preparation that `export` has already done
    quantize_static(
        float_path,
        int8_path,
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        weight_type=QuantType.QInt8,
        activation_type=QuantType.QInt8,
    )


def session(path: Path) -> "ort.InferenceSession":
    """Load a model such that onnxruntime makes integer operators of int8 QuantizeLinear/DequantizeLinear pairs."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def accuracy(path: Path, images: Images, labels: Images) -> float:
    """Share of images [N, 28, 28] that the model at `path` classifies correctly under onnxruntime."""
    model = session(path)
    name = path.stem
    found = [
        model.run(None, {"image": image[None]})[0].argmax()
        for image in track(preprocess(images), f"testing {name}", console=console)
    ]
    return float(np.mean(np.array(found) == labels))


def describe(path: Path, properties: dict[str, str]) -> None:
    """Write `properties` into the metadata of the model at `path`."""
    model = onnx.load(path)
    onnx.helper.set_model_props(model, properties)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


# Command ------------------------------------------------------------------------------------------------------------


def fail(message: str) -> typer.Exit:
    console.print(f"[red]error:[/red] {message}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def ready(data: Path, threads: int, extra: str = "train") -> list[tuple[Images, Images]]:
    """Images and labels to train and to test with, read before anything slow; PyTorch gets `threads`. typer.Exit with a
    sentence where the data or a library of `extra` is missing."""
    try:
        found = [read_dataset(data, part) for part in ("train", "t10k")]
    except FileNotFoundError as error:
        raise fail(
            f"{error.filename} not found: apt-get install dataset-fashion-mnist, or name another folder with --data"
        ) from None
    try:
        import onnxruntime  # noqa: F401
        import torch
    except ImportError as error:
        raise fail(f"{error.name} is not installed: pip install 'celosia\\[{extra}]'") from None
    torch.set_num_threads(threads)
    return found


def main(
    data: Annotated[Path, typer.Option(help="Folder of the four Fashion-MNIST files.")] = Path(
        "/usr/share/datasets/fashion-mnist"
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 60,000 training images.")] = 15,
    out: Annotated[Path, typer.Option(help="Folder to write the model and the test images to.")] = Path(
        __file__
    ).parent,
    float_model: Annotated[Path | None, typer.Option(help="Also keep the float ONNX model, in this file.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of PyTorch.")] = 1,
) -> None:
    """Train ResNet-8 on Fashion-MNIST, quantise it and write resnet8_fashion_int8.onnx and fashion_test.npz."""
    (train_images, train_labels), (test_images, test_labels) = ready(data, threads)
    for folder in [out] + ([float_model.parent] if float_model else []):
        folder.mkdir(parents=True, exist_ok=True)  # now, not after the training

    network = train(train_images, train_labels, epochs)
    int8_path = out / "resnet8_fashion_int8.onnx"
    with tempfile.TemporaryDirectory() as scratch:
        float_path = float_model or Path(scratch) / "resnet8_fashion_float.onnx"
        export(network, float_path)
        quantise(float_path, int8_path, train_images[:CALIBRATION_IMAGES])
        float_accuracy = accuracy(float_path, test_images, test_labels)
    int8_accuracy = accuracy(int8_path, test_images, test_labels)
    describe(
        int8_path,
        {
            "preprocessing": PREPROCESSING,
            "classes": ", ".join(CLASSES),
            "training": f"{epochs} epochs of Fashion-MNIST",
            "test_accuracy_float": f"{float_accuracy:.4f}",
            "test_accuracy_int8": f"{int8_accuracy:.4f}",
        },
    )
    demo = out / "fashion_test.npz"
    np.savez_compressed(
        demo, images=test_images[:DEMO_IMAGES], labels=test_labels[:DEMO_IMAGES], classes=np.array(CLASSES)
    )

    console.print(f"accuracy on {len(test_images):,} test images: float {float_accuracy:.2%}, int8 {int8_accuracy:.2%}")
    for path in (int8_path, demo):
        console.print(f"{path}: {path.stat().st_size:,} bytes", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
