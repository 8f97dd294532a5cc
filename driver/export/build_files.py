"""What an exported model is built with and begins from: Makefile, CMakeLists.txt, and two programs to start from."""

from __future__ import annotations

from celosia.driver.export.places import ALIGN, C_TYPES, nbytes
from celosia.driver.export.source import Model
from celosia.driver.export.targets import ExportTarget

LIBRARY = "celosia_models"
HOSTED = ("device_linux.c",)
"""Files of runtime/ that want an operating system."""
MARK = "TARGET = "
"""Begins the line of the Makefile that says what the folder's kernels are for."""


def makefile(target: ExportTarget) -> str:
    """The text of a Makefile for all models in its folder."""
    hosted = f"""
$(MODELS): %: %_main.c lib{LIBRARY}.a
	$(CC) $(FLAGS) $(CFLAGS) $< lib{LIBRARY}.a -o $@ $(LDLIBS)
"""
    devices = " ".join(("device_mapped.c", *(HOSTED if target.hosted else ())))
    return f"""# Builds lib{LIBRARY}.a of the models in this folder. Written by `celosia export`.
# With gcc or clang for {target.name} as CC and its AR; or with ziglang from PyPI:
#   make CC="python3 -m ziglang cc {" ".join(target.zig)}" AR="python3 -m ziglang ar" FLAGS="{_zig_flags(target)}"

{MARK}{target.name}
FLAGS = {" ".join(target.gcc)}
CFLAGS = -O2 -std=c11 -Wall -Wextra
LDLIBS = {"-lm" if target.hosted else ""}
MODELS = $(patsubst %_data.c,%,$(wildcard *_data.c))
SOURCES = celosia.c {devices} $(MODELS:=.c) $(MODELS:=_data.c)

all: lib{LIBRARY}.a{" $(MODELS)" if target.hosted else ""}

lib{LIBRARY}.a: $(SOURCES:.c=.o)
	$(AR) rcs $@ $^ $(wildcard *_kernels/*.o)

%.o: %.c $(wildcard *.h)
	$(CC) $(FLAGS) $(CFLAGS) -c $< -o $@
{hosted if target.hosted else ""}
clean:
	rm -f *.o *.a{" $(MODELS)" if target.hosted else ""}

.PHONY: all clean
"""


def _zig_flags(target: ExportTarget) -> str:
    return "" if target.hosted else "-ffreestanding"


def cmake(target: ExportTarget) -> str:
    """The text of a CMakeLists.txt for all models in its folder."""
    flags = f"target_compile_options({LIBRARY} PUBLIC {' '.join(target.gcc)})\n" if target.gcc else ""
    hosted = f"""
if(CMAKE_PROJECT_NAME STREQUAL PROJECT_NAME)
  foreach(data ${{datas}})
    string(REGEX REPLACE "_data.c$" "" model ${{data}})
    add_executable(${{model}} ${{model}}_main.c)
    target_link_libraries(${{model}} PRIVATE {LIBRARY})
  endforeach()
endif()
"""
    return f"""# Library `{LIBRARY}` of the models in this folder, for {target.name}. Written by `celosia export`.
cmake_minimum_required(VERSION 3.13)
project({LIBRARY} C)
set(CMAKE_C_STANDARD 11)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

file(GLOB datas RELATIVE ${{CMAKE_CURRENT_SOURCE_DIR}} CONFIGURE_DEPENDS *_data.c)
file(GLOB kernels CONFIGURE_DEPENDS *_kernels/*.o)
string(REPLACE "_data.c" ".c" models "${{datas}}")
add_library({LIBRARY} STATIC celosia.c device_mapped.c {" ".join(HOSTED) if target.hosted else ""} ${{models}} ${{datas}} ${{kernels}})
set_source_files_properties(${{kernels}} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
target_include_directories({LIBRARY} PUBLIC ${{CMAKE_CURRENT_SOURCE_DIR}})
{flags}{f"target_link_libraries({LIBRARY} PUBLIC m)" if target.hosted else ""}
{hosted if target.hosted else ""}"""


def _buffers(model: Model) -> tuple[list[str], list[str], list[str]]:
    """(declarations, names of inputs, names of outputs) of static memory for the tensors."""
    lines: list[str] = []
    names: tuple[list[str], list[str]] = ([], [])
    groups = ("in", model.program.inputs), ("out", model.program.outputs)
    for group, (what, tensors) in zip(names, groups):
        for number, tensor in enumerate(tensors):
            group.append(f"{what}{number}")
            count = max(nbytes(tensor) // _element(tensor.dtype), 1)
            lines.append(f"static {C_TYPES[tensor.dtype]} {what}{number}[{count}];")
    return lines, *names


def _element(dtype: str) -> int:
    from celosia.compiler.program.dtypes import itemsize

    return itemsize(dtype)


def main_program(model: Model) -> str:
    """The text of NAME_main.c: one inference on a board under Linux, of files to files."""
    lines, ins, outs = _buffers(model)
    files = [*ins, *outs]
    usage = " ".join(["REGISTERS", "MEMORY", *(f"{name.upper()}" for name in files)])
    reads = "\n".join(f"    ok = ok && moved(argv[{3 + k}], \"rb\", {name}, sizeof {name});" for k, name in enumerate(ins))
    first = 3 + len(ins)
    writes = "\n".join(
        f"        ok = ok && moved(argv[{first + k}], \"wb\", {name}, sizeof {name});" for k, name in enumerate(outs)
    )
    name, upper = model.name, model.upper
    return f"""/* One inference of {name} on a board under Linux: {name} {usage}
   REGISTERS: their physical address, as 0x43c00000. MEMORY: a buffer of u-dma-buf, as /dev/udmabuf0. Inputs and outputs
   are files of plain bytes. An example to begin from; written by `celosia export`. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "celosia_linux.h"
#include "{name}.h"

static {name} model;
{chr(10).join(lines)}

static int moved(const char *path, const char *mode, void *bytes, size_t size) {{
    FILE *file = fopen(path, mode);
    size_t count = !file ? 0 : *mode == 'r' ? fread(bytes, 1, size, file) : fwrite(bytes, 1, size, file);
    int ok = file && count == size && (*mode != 'r' || fgetc(file) == EOF);
    if (file && fclose(file)) ok = 0;
    if (!ok) fprintf(stderr, "%s: not %zu bytes, or no access\\n", path, size);
    return ok;
}}

int main(int argc, char **argv) {{
    static celosia_linux board;
    int ok = argc == {3 + len(files)};
    if (!ok) fprintf(stderr, "usage: %s {usage}\\n", argv[0]);
{reads}
    if (!ok) return 2;
    int code = celosia_linux_open(&board, strtoull(argv[1], NULL, 0), argv[2], 0, {upper}_DEVICE_BYTES, NULL);
    if (code) {{
        fprintf(stderr, "%s, %s: %s\\n", argv[1], argv[2], strerror(code));
        return 1;
    }}
    code = {name}_open(&model, &board.device);
    if (!code) code = {name}_run({", ".join(["&model", *ins, *outs])});
    if (code) {{
        fprintf(stderr, "instruction %u: %s\\n", (unsigned)model.state.instruction, celosia_text(code));
    }} else {{
        fprintf(stderr, "%llu cycles\\n", (unsigned long long)model.state.cycles);
{writes}
    }}
    if ({name}_close(&model) && !code) code = 1;
    celosia_linux_close(&board);
    return code || !ok;
}}
"""


def bridge_program(model: Model) -> str:
    """The text of a program that runs the model on a device behind a bridge, as often as it is told to."""
    lines, ins, outs = _buffers(model)
    takes = "\n".join(f"        celosia_bridge_take({name}, sizeof {name});" for name in ins)
    gives = "\n".join(f"        celosia_bridge_give({name}, sizeof {name});" for name in outs)
    name, upper = model.name, model.upper
    size = max(model.device_bytes(), ALIGN)
    return f"""#include "celosia_bridge.h"
#include "{name}.h"

static {name} model;
static _Alignas({ALIGN}) uint8_t device_memory[{size}];
{chr(10).join(lines)}

int main(void) {{
    celosia_device device = celosia_bridge(device_memory, {upper}_DEVICE_BYTES);
    int code = {name}_open(&model, &device);
    while (celosia_bridge_told(code, model.state.instruction)) {{
{takes}
        code = {name}_run({", ".join(["&model", *ins, *outs])});
        if (code) continue;
{gives}
    }}
    return {name}_close(&model);
}}
"""
