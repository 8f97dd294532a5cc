"""Train a small character-level GPT on Python's help topics, quantise it to int8, and write the demo decoder.

    python models/train_gpt.py --steps 3500

The text is what `help("topics")` of Python shows, so nothing is downloaded. The exported model takes and returns its
caches as those that optimum exports do: see `celosia.models.gpt_path`.
"""

import json
import math
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import onnx
import typer
from numpy.typing import NDArray
from rich.progress import track

from celosia.models.train_resnet8 import console, describe, fail, session

if TYPE_CHECKING:
    from torch import Tensor, nn

LAYERS, WIDTH, HEADS, CONTEXT = 4, 128, 4, 128
HEAD_SIZE = WIDTH // HEADS
UNSEEN = -1e9
"""What is added to a score of which softmax shall make 0."""
BATCH, RATE = 16, 3e-3
CALIBRATION_WINDOWS = 100
OPSET = 17
ASCII = {"–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "…": "..."}
"""What stands for characters outside of ASCII; for others it is a space."""

PAIRS = [f"{layer}.{what}" for layer in range(LAYERS) for what in ("key", "value")]
PAST, PRESENT = [f"past_key_values.{pair}" for pair in PAIRS], [f"present.{pair}" for pair in PAIRS]

Tokens = NDArray[np.int64]


# Data ---------------------------------------------------------------------------------------------------------------


def read_topics() -> str:
    """Python's help topics, joined in the order of their names; printable ASCII and newlines."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).translate({ord(c): ASCII[c] for c in ASCII})
    return "".join(c if c == "\n" or " " <= c <= "~" else " " for c in text)


def read_tokens() -> tuple[Tokens, Tokens, list[str]]:
    """Tokens to train with, the last tenth, which is held out, and the vocabulary: a token is a character's index."""
    text = read_topics()
    vocabulary = sorted(set(text))
    index = {character: number for number, character in enumerate(vocabulary)}
    tokens = np.array([index[character] for character in text], np.int64)
    held_out = len(tokens) // 10
    return tokens[:-held_out], tokens[-held_out:], vocabulary


def windows(tokens: Tokens, length: int = CONTEXT) -> Tokens:
    """`tokens` cut into rows [count, length]; what is left at the end is not in them."""
    return tokens[: len(tokens) // length * length].reshape(-1, length)


# Network ------------------------------------------------------------------------------------------------------------


def gpt(vocabulary: int) -> "nn.Module":
    """A GPT with normalisations in front of its blocks, 0.8 million parameters.

    forward(input_ids [batch, steps], attention_mask [batch, total], position_ids [batch, steps], *caches) with keys
    and values [batch, HEADS, past, HEAD_SIZE] of each layer in turn, total = past + steps, returns the logits
    [batch, steps, vocabulary] and the caches [batch, HEADS, total, HEAD_SIZE].
    """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class DecoderBlock(nn.Module):  # type: ignore[misc]
        """Attention and two products around GELU. Rows of all sequences are one matrix, so that products are Gemm."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.dropout = nn.Dropout(0.1)

        def heads(self, rows: "Tensor", batch: int) -> "Tensor":
            return rows.view(batch, -1, HEADS, HEAD_SIZE).transpose(1, 2)

        def forward(
            self, x: "Tensor", mask: "Tensor", past_key: "Tensor", past_value: "Tensor"
        ) -> tuple["Tensor", "Tensor", "Tensor"]:
            batch, rows = len(past_key), self.norm1(x)
            key = torch.cat([past_key, self.heads(self.key(rows), batch)], 2)
            value = torch.cat([past_value, self.heads(self.value(rows), batch)], 2)
            scores = self.heads(self.query(rows), batch) @ key.transpose(2, 3) * HEAD_SIZE**-0.5
            mixed = F.softmax(scores + mask, -1) @ value
            x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(-1, WIDTH)))
            x = x + self.dropout(self.narrow(F.gelu(self.wide(self.norm2(x)))))
            return x, key, value

    class Gpt(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.ModuleList(DecoderBlock() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
            self.dropout = nn.Dropout(0.1)
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:  # as in GPT-2: what the residuals sum up is of the order of 1
                    last = name.endswith(("out.weight", "narrow.weight"))
                    nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if last else 0.02)
                elif name.endswith("bias"):
                    nn.init.zeros_(parameter)

        def forward(
            self, input_ids: "Tensor", attention_mask: "Tensor", position_ids: "Tensor", *caches: "Tensor"
        ) -> tuple["Tensor", ...]:
            batch, steps = len(input_ids), input_ids.shape[1]
            columns = torch.arange(attention_mask.shape[1])
            rows = columns[-steps:]  # the new ones are the last
            seen = (columns <= rows[:, None]) & (attention_mask[:, None, None] == 1)
            mask = torch.where(seen, 0.0, UNSEEN)
            x = self.dropout(self.tokens(input_ids) + self.positions(position_ids)).view(-1, WIDTH)
            present: list[Tensor] = []
            for block, key, value in zip(self.blocks, caches[::2], caches[1::2]):
                x, *kept = block(x, mask, key, value)
                present += kept
            return self.head(self.norm(x)).view(batch, -1, vocabulary), *present

    return Gpt()


def empty_caches(batch: int) -> list["Tensor"]:
    """Caches of nothing, with which a sequence begins."""
    import torch

    return [torch.zeros(batch, HEADS, 0, HEAD_SIZE) for _ in range(2 * LAYERS)]


def train(tokens: Tokens, vocabulary: int, steps: int) -> "nn.Module":
    """Train on windows of CONTEXT tokens at random places; returns the network in evaluation mode."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(0)
    network = gpt(vocabulary)
    matrices = [parameter for parameter in network.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in network.parameters() if parameter.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.05, cycle_momentum=False)
    text, places = torch.from_numpy(tokens), torch.arange(CONTEXT + 1)
    mask, caches = torch.ones(BATCH, CONTEXT, dtype=torch.int64), empty_caches(BATCH)
    total, began = 0.0, time.monotonic()
    for step in range(1, steps + 1):
        rows = text[torch.randint(len(text) - CONTEXT, (BATCH, 1)) + places]
        logits = network(rows[:, :-1], mask, places[:-1].expand(BATCH, -1), *caches)[0]
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % 50 == 0:
            minutes = (time.monotonic() - began) / 60
            console.print(f"step {step}/{steps}: training loss {total / 50:.3f}, {minutes:.1f} minutes")
            total = 0.0
    return network.eval()


# Export -------------------------------------------------------------------------------------------------------------


def export(network: "nn.Module", path: Path) -> None:
    """Write the float model with open sizes, inputs and outputs as `celosia.models.gpt_path` says.

    RuntimeError where onnxruntime and the network in evaluation mode give different logits or caches.
    """
    import torch

    given, made = ["input_ids", "attention_mask", "position_ids", *PAST], ["logits", *PRESENT]
    axes = {"input_ids": {1: "steps"}, "attention_mask": {1: "total"}, "position_ids": {1: "steps"}}
    axes |= {"logits": {1: "steps"}} | {name: {2: "past"} for name in PAST} | {name: {2: "total"} for name in PRESENT}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of this exporter, and of the batch, which is to be a constant
        torch.onnx.export(
            network, example(3, 5), path, input_names=given, output_names=made, dynamic_axes=axes, opset_version=OPSET,
            dynamo=False,  # the newer one keeps names of two of the sizes only, as the third is their sum
        )  # fmt: skip
    proto = onnx.load(path)
    logits = proto.graph.output[0].type.tensor_type.shape.dim
    logits[0].dim_value, logits[2].dim_value = 1, network.head.out_features  # which the exporter does not know
    onnx.save(proto, path)
    model = session(path)
    for steps, past in ((1, 0), (7, 0), (CONTEXT, 0), (1, 9), (4, 20), (1, CONTEXT - 1)):
        inputs = example(steps, past)
        found = model.run(made, {name: value.numpy() for name, value in zip(given, inputs)})
        with torch.no_grad():
            expected = network(*inputs)
        for name, a, b in zip(made, found, expected):
            if a.shape != b.shape or not np.allclose(a, b.numpy(), atol=1e-3):
                raise RuntimeError(f"{path}: {name} of {steps} steps after {past} is not what PyTorch computes")


def example(steps: int, past: int) -> tuple["Tensor", ...]:
    """Random inputs of the network, all of `past` valid."""
    import torch

    random = torch.Generator().manual_seed(steps)
    ids = torch.randint(0, 90, (1, steps), generator=random)
    caches = [torch.randn(1, HEADS, past, HEAD_SIZE, generator=random) for _ in range(2 * LAYERS)]
    places = torch.arange(past, past + steps)[None]
    return ids, torch.ones(1, past + steps, dtype=torch.int64), places, *caches


def quantise(float_path: Path, int8_path: Path, tokens: Tokens) -> None:
    """Write the int8 model as `celosia quantize` makes it of windows from all of `tokens`."""
    rows = windows(tokens)
    samples = float_path.with_name("samples.npz")
    np.savez(samples, input_ids=rows[np.linspace(0, len(rows) - 1, CALIBRATION_WINDOWS).astype(int)])
    command = [sys.executable, "-m", "celosia.driver.cli", "quantize"]
    subprocess.run([*command, float_path, "--calibration", samples, "-o", int8_path], check=True)


def perplexity(path: Path, tokens: Tokens) -> float:
    """Perplexity of the model at `path` under onnxruntime: of `tokens` in windows of CONTEXT, all but the first of
    each window."""
    import torch
    from torch.nn import functional as F

    model, losses = session(path), []
    fixed = {"attention_mask": np.ones((1, CONTEXT), np.int64), "position_ids": np.arange(CONTEXT)[None]}
    fixed |= {name: np.zeros((1, HEADS, 0, HEAD_SIZE), np.float32) for name in PAST}
    for row in track(windows(tokens), f"testing {path.stem}", console=console):
        logits = model.run(["logits"], {"input_ids": row[None], **fixed})[0][0]
        losses.append(F.cross_entropy(torch.from_numpy(logits[:-1]), torch.from_numpy(row[1:])).item())
    return math.exp(np.mean(losses))


# Command ------------------------------------------------------------------------------------------------------------


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps, of 16 windows of 128 characters each.")] = 3500,
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")] = Path(__file__).parent,
    float_model: Annotated[Path | None, typer.Option(help="Also keep the float ONNX model, in this file.")] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="PyTorch's weights: from this file where it exists, else kept there."),
    ] = None,
) -> None:
    """Train a GPT on Python's help topics, quantise it and write gpt_topics_int8.onnx."""
    try:
        import onnxruntime  # noqa: F401
        import torch
    except ImportError as error:
        raise fail(f"{error.name} is not installed: pip install 'celosia\\[train]'") from None
    torch.set_num_threads(1)
    for folder in [out] + ([float_model.parent] if float_model else []):
        folder.mkdir(parents=True, exist_ok=True)  # now, not after the training

    tokens, held_out, vocabulary = read_tokens()
    if weights and weights.exists():
        network = gpt(len(vocabulary)).eval()
        network.load_state_dict(torch.load(weights))
    else:
        network = train(tokens, len(vocabulary), steps)
        if weights:
            torch.save(network.state_dict(), weights)
    int8_path = out / "gpt_topics_int8.onnx"
    with tempfile.TemporaryDirectory() as scratch:
        float_path = float_model or Path(scratch) / "gpt_topics_float.onnx"
        export(network, float_path)
        quantise(float_path, int8_path, tokens)
        float_perplexity = perplexity(float_path, held_out)
    int8_perplexity = perplexity(int8_path, held_out)
    describe(
        int8_path,
        {
            "vocabulary": json.dumps(vocabulary),
            "training": f"{steps} steps on the help topics of Python {platform.python_version()}",
            "held_out_perplexity_float": f"{float_perplexity:.4f}",
            "held_out_perplexity_int8": f"{int8_perplexity:.4f}",
        },
    )
    parameters = sum(parameter.numel() for parameter in network.parameters())
    console.print(f"{parameters:,} parameters, {len(tokens):,} characters to train with, {len(held_out):,} held out")
    console.print(f"perplexity of a held-out character: float {float_perplexity:.4f}, int8 {int8_perplexity:.4f}")
    console.print(f"{int8_path}: {int8_path.stat().st_size:,} bytes", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
