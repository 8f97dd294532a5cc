"""The Program: contents of a compiled model, its file, and its host runtime.

dtypes, op_spec       what element types there are; what the compiler knows of each operator
model                what a Program contains: tensors, steps, kernels, image
activation_packing   how activations lie in the accelerator's DRAM
bit_levels           which few-bit code holds the values of a tensor
saved, program_file  how arrays, operators and a Program become a file, and back
safe_files           how files are read and replaced without ever leaving half of one
check_program        which contents are refused before they run
host/                how kernels and numpy operators run on the CPU
html                 how tables look in notebooks
"""

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
from celosia.compiler.program.program_file import FORMAT, MAX_PART_BYTES, VERSION, Program

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
