"""The Program: contents of a compiled model, its file, and its host runtime.

dtypes         which element types exist, and their ONNX numbers
op_spec        what all passes know of each operator: operands, kind for fusion, quantised form, domain
model          what a Program contains: tensors, steps (CpuStep, HostStep, and LaunchStep for a launch), kernels,
               constants, image; in which order the values of an activation lie in the accelerator's DRAM; what reports
               know of a layer (`LayerInfo`; remarks are its `note`); how tables look in notebooks
program_file   which parts the file of a Program has, its format version, and limits of size; how arrays, host operators
               and dataclasses become bytes, and back
check_program  which contents are refused before they run, once they are read
safe_files     how any file of Celosia is read and replaced without ever leaving half of one
host/          how kernels and numpy operators run on the CPU
"""

from celosia.compiler.program.model import (
    ArenaPlan,
    BodySteps,
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
    with_inner_steps,
)
from celosia.compiler.program.program_file import FORMAT, MAX_PART_BYTES, VERSION, Program

__all__ = [
    "FORMAT",
    "MAX_PART_BYTES",
    "VERSION",
    "ArenaPlan",
    "BodySteps",
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
    "with_inner_steps",
]  # fmt: skip
