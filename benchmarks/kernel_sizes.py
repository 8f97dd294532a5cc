"""The sizes at which kernels are timed: those that layers of widely used networks have, as rows of tables.

A row's name is its kind and its sizes. Networks by their letters: R ResNet-18 and -50 at 224, M MobileNetV2 at 224,
Q SqueezeNet 1.1, T the ResNet-8 of MLPerf Tiny, B BERT-base with 128 tokens, L MiniLM with 128 tokens, V ViT-tiny with
197 tokens, G a step of GPT-2 after 128 tokens.
"""

from __future__ import annotations

CONVOLUTIONS = (
    # channels, size, channels out, kernel, stride, groups
    (128, 28, 128, 3, 1, 1),  # R
    (256, 14, 256, 3, 1, 1),
    (256, 14, 512, 3, 2, 1),
    (64, 56, 128, 1, 2, 1),
    (256, 56, 64, 1, 1, 1),
    (64, 56, 256, 1, 1, 1),
    (1024, 14, 256, 1, 1, 1),
    (512, 7, 2048, 1, 1, 1),
    (3, 224, 32, 3, 2, 1),  # M
    (32, 112, 16, 1, 1, 1),
    (16, 112, 96, 1, 1, 1),
    (24, 56, 144, 1, 1, 1),
    (144, 56, 24, 1, 1, 1),
    (192, 28, 32, 1, 1, 1),
    (64, 14, 384, 1, 1, 1),
    (576, 14, 96, 1, 1, 1),
    (160, 7, 960, 1, 1, 1),
    (320, 7, 1280, 1, 1, 1),
    (96, 112, 96, 3, 2, 96),
    (192, 28, 192, 3, 1, 192),
    (384, 14, 384, 3, 1, 384),
    (960, 7, 960, 3, 1, 960),
    (64, 55, 16, 1, 1, 1),  # Q
    (16, 55, 64, 3, 1, 1),
    (48, 13, 192, 3, 1, 1),
    (16, 32, 16, 3, 1, 1),  # T
    (64, 8, 64, 3, 1, 1),
)
QUANTISED = (
    # channels, size, channels out, kernel, groups, type of the image
    (64, 56, 64, 3, 1, "int8"),  # R
    (256, 14, 256, 3, 1, "uint8"),
    (256, 56, 64, 1, 1, "uint8"),
    (24, 56, 144, 1, 1, "uint8"),  # M
    (144, 56, 24, 1, 1, "int8"),
    (576, 14, 96, 1, 1, "uint8"),
    (384, 14, 384, 3, 384, "uint8"),
    (16, 32, 16, 3, 1, "int8"),  # T
)
PRODUCTS = (
    # rows, depth, columns
    (1, 512, 1000),  # R
    (1, 1280, 1000),  # M
    (1, 64, 10),  # T
    (128, 768, 768),  # B
    (128, 768, 3072),
    (128, 3072, 768),
    (128, 384, 384),  # L
    (197, 192, 576),  # V
    (1, 768, 2304),  # G
    (1, 768, 3072),
    (1, 3072, 768),
    (32, 32, 32),
    (16, 64, 16),
)
BYTES = (
    # rows, depth, columns
    (1, 768, 3072),  # G
    (128, 768, 768),  # B
    (128, 384, 384),  # L
)
BATCHED = (
    # heads, rows, depth, columns
    (12, 128, 128, 64),  # B
    (12, 1, 64, 128),  # G
    (12, 1, 128, 64),
    (3, 197, 64, 197),  # V
)
SOFTMAX = ((1, 1000), (12, 1, 128), (12, 128, 32), (3, 197, 197), (1, 12, 256, 256))
NORMALISED = ((1, 768), (128, 384), (197, 192))
ELEMENTWISE = (
    # operator, its inputs
    ("Relu", ((1, 64, 112, 112),)),  # R
    ("Relu", ((1, 16, 55, 55),)),  # Q
    ("Add", ((1, 256, 14, 14),) * 2),  # R
    ("Mul", ((1, 96, 28, 28), (1, 96, 1, 1))),  # squeeze and excite
    ("Add", ((128, 768),) * 2),  # B
    ("Add", ((12, 128, 128), (1, 1, 128))),  # a mask
    ("Mul", ((1, 768),) * 2),  # G
    ("Sub", ((1, 3, 224, 224), (1, 3, 1, 1))),
    ("Div", ((128, 768), (128, 1))),
    ("Sqrt", ((128, 768),)),
    ("Erf", ((128, 1536),)),  # L
    ("Tanh", ((1, 3072),)),  # G
    ("Sigmoid", ((1, 96, 14, 14),)),
    ("HardSwish", ((1, 96, 28, 28),)),
    ("Neg", ((1, 64, 28, 28),)),
    ("Exp", ((1, 1000),)),
)
POOLS = (
    # operator, channels, size, kernel, stride
    ("MaxPool", 64, 111, 3, 2),  # Q
    ("MaxPool", 16, 32, 2, 2),  # T
    ("AveragePool", 64, 8, 8, 1),
)
MEANS = ((1280, 7), (2048, 7), (1000, 13))
TRANSPOSED = (
    # shape, order
    ((1, 128, 12, 64), (0, 2, 3, 1)),  # B
    ((1, 12, 128, 64), (0, 2, 1, 3)),
    ((1, 224, 224, 3), (0, 3, 1, 2)),
)
