"""Write the files that build an exported model: Makefile, CMakeLists.txt, and example programs."""

from __future__ import annotations

from collections.abc import Sequence

from celosia.compiler.program.dtypes import itemsize
from celosia.driver.board.board_device import PAGE
from celosia.driver.export.memory_map import ALIGN, C_TYPES, align, nbytes
from celosia.driver.export.source import CModel
from celosia.driver.export.targets import ExportTarget

LIBRARY = "celosia_models"
"""Name of the static library that the build files make of all models in a folder."""
HOSTED = ("device_linux.c",)
"""Files of runtime/ that need an operating system."""
TOOLCHAIN = "ziglang.cmake"
"""Name of the CMake toolchain file."""
TARGET_LINE_START = "TARGET = "
"""Start of the line of the Makefile that names the target of the folder's kernels."""


def makefile(target: ExportTarget) -> str:
    """Return the text of a Makefile for all models in its folder."""
    hosted = f"""
$(MODELS): %: %_main.c lib{LIBRARY}.a
	$(CC) $(FLAGS) $(CFLAGS) $< lib{LIBRARY}.a -o $@ $(LDLIBS)
"""
    devices = " ".join(_device_files(target))
    return f"""# Builds lib{LIBRARY}.a of the models in this folder. Written by `celosia export`.
# With gcc or clang for {target.name} as CC and its AR; or with ziglang from PyPI:
#   make CC="python3 -m ziglang cc {" ".join(target.zig)}" AR="python3 -m ziglang ar" FLAGS="{_zig_flags(target)}"

{TARGET_LINE_START}{target.name}
FLAGS = {" ".join(target.gcc)}
CFLAGS = -O2 -std=c11 -Wall -Wextra
LDLIBS = {"-lm" if target.hosted else ""}
MODELS = $(patsubst %_celosia.c,%,$(wildcard *_celosia.c))
SOURCES = celosia.c {devices} $(MODELS:=.c) $(MODELS:=_celosia.c)

all: lib{LIBRARY}.a{" $(MODELS)" if target.hosted else ""}

lib{LIBRARY}.a: $(SOURCES:.c=.o)
	$(AR) rcs $@ $^ $(wildcard $(MODELS:=_kernels/*.o))

%.o: %.c $(wildcard *.h)
	$(CC) $(FLAGS) $(CFLAGS) -c $< -o $@
{hosted if target.hosted else ""}
clean:
	rm -f $(SOURCES:.c=.o) lib{LIBRARY}.a{" $(MODELS)" if target.hosted else ""}

.PHONY: all clean
"""


def _device_files(target: ExportTarget) -> tuple[str, ...]:
    """Return the C files of runtime/ that reach the accelerator on `target`."""
    return ("device_mapped.c", *(HOSTED if target.hosted else ()))


def _zig_flags(target: ExportTarget) -> str:
    """Return the compiler flags that `zig cc` needs besides those of the target."""
    return "" if target.hosted else "-ffreestanding"


def cmake(target: ExportTarget) -> str:
    """Return the text of a CMakeLists.txt for all models in its folder."""
    devices = " ".join(_device_files(target))
    hosted = f"""
if(CMAKE_PROJECT_NAME STREQUAL PROJECT_NAME)
  foreach(data ${{datas}})
    string(REGEX REPLACE "_celosia.c$" "" model ${{data}})
    add_executable(${{model}}_main ${{model}}_main.c)
    set_target_properties(${{model}}_main PROPERTIES OUTPUT_NAME ${{model}})
    target_link_libraries(${{model}}_main PRIVATE {LIBRARY})
  endforeach()
endif()
"""
    return f"""# Library `{LIBRARY}` of the models in this folder, for {target.name}. Written by `celosia export`.
# With gcc or clang for {target.name} as CC; or with ziglang from PyPI:
#   cmake -B build -DCMAKE_TOOLCHAIN_FILE={TOOLCHAIN}
cmake_minimum_required(VERSION 3.13)
project({LIBRARY} C)
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_EXTENSIONS OFF)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

file(GLOB datas RELATIVE ${{CMAKE_CURRENT_SOURCE_DIR}} CONFIGURE_DEPENDS *_celosia.c)
string(REPLACE "_celosia.c" "_kernels/*.o" objects "${{datas}}")
file(GLOB kernels CONFIGURE_DEPENDS ${{objects}})
string(REPLACE "_celosia.c" ".c" models "${{datas}}")
add_library({LIBRARY} STATIC celosia.c {devices} ${{models}} ${{datas}} ${{kernels}})
set_source_files_properties(${{kernels}} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
target_compile_options({LIBRARY} PUBLIC "SHELL:-iquote \\"${{CMAKE_CURRENT_SOURCE_DIR}}\\"") # a model may be time.h
if(NOT DEFINED CELOSIA_FLAGS)
  set(CELOSIA_FLAGS {" ".join(target.gcc)})
endif()
target_compile_options({LIBRARY} PUBLIC ${{CELOSIA_FLAGS}})
{f"target_link_libraries({LIBRARY} PUBLIC m)" if target.hosted else ""}
{hosted if target.hosted else ""}"""


def toolchain(target: ExportTarget) -> str:
    """Return the text of a CMake toolchain file for ziglang."""
    system = "Linux" if target.hosted else "Generic"
    return f"""# ziglang from PyPI as compiler for {target.name}. Written by `celosia export`.
set(CMAKE_SYSTEM_NAME {system})
set(CMAKE_SYSTEM_PROCESSOR {target.name.partition("-")[0]})
set(CMAKE_C_COMPILER python3 -m ziglang cc {" ".join(target.zig)})
set(CELOSIA_FLAGS "{_zig_flags(target)}")
set(CMAKE_C_ARCHIVE_CREATE "python3 -m ziglang ar qc <TARGET> <OBJECTS>")
set(CMAKE_C_ARCHIVE_FINISH "python3 -m ziglang ranlib <TARGET>")
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
"""


def _static_buffers(model: CModel) -> tuple[list[str], list[str], list[str]]:
    """Return (C declarations, names of inputs, names of outputs) of static arrays for a model's tensors.

    A target without an operating system may have no malloc.
    """
    lines: list[str] = []
    array_names: tuple[list[str], list[str]] = ([], [])
    groups = ("in", model.program.inputs), ("out", model.program.outputs)
    for names, (kind, tensors) in zip(array_names, groups):
        for number, tensor in enumerate(tensors):
            names.append(f"{model.name}_{kind}{number}")
            count = max(nbytes(tensor) // itemsize(tensor.dtype), 1)
            lines.append(f"static {C_TYPES[tensor.dtype]} {names[-1]}[{count}];")
    return lines, *array_names


def main_program(model: CModel) -> str:
    """Return the text of NAME_main.c, an example program: one inference from files to files.

    For a model with launches it runs on a board under Linux.
    """
    needs_board = bool(model.device_bytes())
    lines, ins, outs = _static_buffers(model)
    first_argument = 3 if needs_board else 1
    tensors = [name.removeprefix(f"{model.name}_").upper() for name in (*ins, *outs)]
    usage = " ".join([*(["REGISTERS", "MEMORY"] if needs_board else []), *tensors])
    sizes = map(nbytes, (*model.program.inputs, *model.program.outputs))
    file_calls = [
        f'ok = ok && {model.name}_moved(argv[{k}], "{{}}", {name}, {size}u);'
        for k, (name, size) in enumerate(zip((*ins, *outs), sizes), first_argument)
    ]
    reads = "\n".join(f"    {call.format('rb')}" for call in file_calls[: len(ins)])
    writes = "\n".join(f"        {call.format('wb')}" for call in file_calls[len(ins) :])
    name = model.name
    return f"""/* One inference of {name}: {name} {usage}
{_BOARD_USAGE if needs_board else ""}   Inputs and outputs are files of plain bytes. An example, by `celosia export`. */

#include <stdio.h>
#include <stdlib.h>

{'#include "celosia_linux.h"' if needs_board else ""}
#include "{name}.h"

static {name} {name}_here;
{chr(10).join(lines)}

static int {name}_moved(const char *path, const char *mode, void *bytes, size_t size) {{
    FILE *file = fopen(path, mode);
    size_t count = !file ? 0 : *mode == 'r' ? fread(bytes, 1, size, file) : fwrite(bytes, 1, size, file);
    int ok = file && count == size && (*mode != 'r' || fgetc(file) == EOF);
    if (file && fclose(file)) ok = 0;
    if (!ok) fprintf(stderr, "%s: not %zu bytes, or no access\\n", path, size);
    return ok;
}}

int main(int argc, char **argv) {{
    int code, ok = argc == {first_argument + len(file_calls)};
    if (!ok) fprintf(stderr, "usage: %s {usage}\\n", argv[0]);
{reads}
    if (!ok) return 2;
{_BOARD.replace("BYTES", f"{model.upper}_DEVICE_BYTES") if needs_board else _NO_BOARD}
    code = {name}_open(&{name}_here, device);
    if (!code) code = {name}_run({", ".join([f"&{name}_here", *ins, *outs])});
    if (code) {{
        fprintf(stderr, "instruction %u: %s\\n", (unsigned){name}_here.state.instruction, celosia_text(code));
    }} else {{
        fprintf(stderr, "%llu cycles\\n", (unsigned long long){name}_here.state.cycles);
{writes}
    }}
    if ({name}_close(&{name}_here) && !code) code = 1;
{"    celosia_linux_close(&board);" if needs_board else ""}
    return code || !ok;
}}
"""


_BOARD_USAGE = """   REGISTERS: their physical address, as 0x43c00000. MEMORY: a buffer of u-dma-buf, as /dev/udmabuf0.
"""
_BOARD = """    static celosia_linux board;
    const celosia_device *device = &board.device;
    code = celosia_linux_open(&board, strtoull(argv[1], NULL, 0), argv[2], 0, BYTES, NULL);
    if (code) {
        fprintf(stderr, "%s, %s: %s\\n", argv[1], argv[2], strerror(code));
        return 1;
    }"""
_NO_BOARD = """    static const celosia_device none, *device = &none; /* all of it runs on this processor */"""
"""Parts of NAME_main.c: usage and opening of a board, and the device of a model without launches."""


def bridge_program(models: Sequence[CModel]) -> str:
    """Return the text of a program that runs these models on the simulated device of a `bridge.Bridge`.

    The Bridge tells it which model to run next. Each model has a part of the device's memory.
    """
    names = [model.name for model in models]
    sizes = [align(model.device_bytes(), PAGE) for model in models]
    includes = "\n".join(f'#include "{name}.h"' for name in names)
    instances = "\n".join(f"static {name} model_{name};" for name in names)
    open_calls = "\n".join(
        f"    part(&devices[{number}], &bridge, {sum(sizes[:number])});\n"
        f"    if (!code) code = {name}_open(&model_{name}, &devices[{number}]);"
        for number, name in enumerate(names)
    )
    cases = "\n".join(_bridge_case(model, number) for number, model in enumerate(models, 1))
    close_calls = "\n".join(f"    {name}_close(&model_{name});" for name in names)
    return f"""#include "celosia_bridge.h"
{includes}

static _Alignas({ALIGN}) uint8_t device_memory[{max(sum(sizes), ALIGN)}];
static celosia_device devices[{len(models)}];
{instances}

/* The device from a byte of its memory on. */
static void part(celosia_device *made, const celosia_device *whole, size_t start) {{
    *made = *whole;
    made->memory += start;
    made->base += start;
    made->size -= start;
}}

int main(void) {{
    celosia_device bridge = celosia_bridge(device_memory, {sum(sizes)});
    int code = 0;
    uint32_t instruction = 0, next;
{open_calls}
    while ((next = celosia_bridge_told(code, instruction))) {{
        switch (next) {{
{cases}
        }}
    }}
{close_calls}
    return 0;
}}
"""


def _bridge_case(model: CModel, number: int) -> str:
    """Return the C `case` that runs one model: receive inputs, run, and, if the run ends well, send outputs."""
    lines, ins, outs = _static_buffers(model)
    declarations = "\n".join(f"            {line}" for line in lines)
    input_arrays, output_arrays = zip(ins, model.program.inputs), zip(outs, model.program.outputs)
    input_calls = "\n".join(
        f"            celosia_bridge_take({name}, {nbytes(tensor)}u);" for name, tensor in input_arrays
    )
    output_calls = "\n".join(
        f"            if (!code) celosia_bridge_give({name}, {nbytes(tensor)}u);" for name, tensor in output_arrays
    )
    name = model.name
    return f"""        case {number}: {{
{declarations}
{input_calls}
            code = {name}_run({", ".join([f"&model_{name}", *ins, *outs])});
            instruction = model_{name}.state.instruction;
{output_calls}
            break;
        }}"""
