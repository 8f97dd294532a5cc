"""A compiled model, its file, and what holds of a sound one."""

from celosia.compiler.program.file import FORMAT, MAX_PART_BYTES, VERSION, Program
from celosia.compiler.program.model import (
    ArenaPlan,
    Contents,
    CpuStep,
    FormInfo,
    HostStep,
    InputError,
    LaunchStep,
    LayerInfo,
    NodeInfo,
    Pack,
    PartInfo,
    PassInfo,
    ProgramError,
    Step,
    TensorInfo,
    Unpack,
)

__all__ = [
    "FORMAT",
    "MAX_PART_BYTES",
    "VERSION",
    "ArenaPlan",
    "Contents",
    "CpuStep",
    "FormInfo",
    "HostStep",
    "InputError",
    "LaunchStep",
    "LayerInfo",
    "NodeInfo",
    "Pack",
    "PartInfo",
    "PassInfo",
    "Program",
    "ProgramError",
    "Step",
    "TensorInfo",
    "Unpack",
]  # fmt: skip
