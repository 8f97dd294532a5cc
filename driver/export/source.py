"""Write a Program as C: a header with entry points, the steps as calls, constants and instructions as arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import CpuStep, LaunchStep, Pack, Program, TensorInfo, Unpack
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.driver.export.forms import form_of
from celosia.driver.export.memory_map import ALIGN, C_TYPES, Location, MemoryMap, nbytes
from celosia.hw.sources import sources_identity

WORDS_PER_LINE = 6
"""64-bit words in a line of an array."""
RESERVED_NAMES = re.compile(
    "auto|break|case|char|const|continue|default|do|double|else|enum|extern|float|for|goto|if|inline|int|long|register|"
    "restrict|return|short|signed|sizeof|static|struct|switch|typedef|union|unsigned|void|volatile|while|"
    "alignas|alignof|and|and_eq|asm|bitand|bitor|bool|catch|class|compl|concept|constexpr|decltype|delete|explicit|export|"
    "false|friend|mutable|namespace|new|noexcept|not|not_eq|nullptr|operator|or|or_eq|private|protected|public|requires|"
    "template|this|throw|true|try|typeid|typename|using|virtual|wchar_t|xor|xor_eq|"
    r"main|u?int(?:_fast|_least)?\d+_\w+|u?int(?:ptr|max)_\w+|(?:size|wchar|wint|ptrdiff|sig_atomic|max_align|l?l?div)_\w+|"
    "null|offsetof|mem(?:chr|cmp|cpy|move|set)|str(?:cat|chr|cmp|coll|cpy|cspn|error|len|ncat|ncmp|ncpy|pbrk|rchr|spn|"
    "str|tok|xfrm|tod|tof|told|toll?|toull?)|file|fpos_t|eof|bufsiz|rand_max|seek_(?:cur|end|set)|exit_(?:failure|success)|"
    "(?:filename|fopen|tmp|mb_cur)_max|l_tmpnam|std(?:in|out|err)|v?[fs]?(?:printf|scanf)|v?snprintf|"
    "f(?:close|eof|error|flush|getc|getpos|gets|open|putc|puts|read|reopen|seek|setpos|tell|write)|clearerr|getc(?:har)?|"
    "perror|putc(?:har)?|puts|remove|rename|rewind|setv?buf|tmpfile|tmpnam|ungetc|abort|(?:l|ll)?(?:abs|div)|"
    "(?:quick_)?exit|at(?:_quick_)?exit|ato(?:f|i|ll?)|bsearch|qsort|s?rand|[cm]alloc|aligned_alloc|realloc|free|getenv|"
    r"system|mblen|mbtowc|wctomb|mbstowcs|wcstombs|all|clean|celosia\w*|device_\w+|\w+_(?:main|celosia)",
    re.IGNORECASE,
)
"""Pattern of names that a model must not have in C.

Keywords of C and C++; names of the headers that files include (stddef.h, stdint.h, string.h, stdio.h, stdlib.h);
functions and files of runtime/; files of other models; targets of the Makefile."""


def identifier(text: str) -> str:
    """Return `text` as an identifier of C that a model may have: other characters become `_`.

    >>> identifier("net:0"), identifier("3x"), identifier(""), identifier("class"), identifier("_x")
    ('net_0', 'model_3x', 'model', 'class_model', 'model__x')
    """
    name = re.sub(r"\W", "_", text, flags=re.ASCII)
    if not name or name[0].isdigit() or name[0] == "_":  # a leading _ is for compilers and headers
        return f"model_{name}".rstrip("_")
    return f"{name}_model" if RESERVED_NAMES.fullmatch(name) else name


def parameter_names(tensors: tuple[TensorInfo, ...], kind: str) -> list[str]:
    """Return a distinct C parameter name for each tensor. It begins with `kind` ("in", "out"), so it is no keyword."""
    names: list[str] = []
    for number, tensor in enumerate(tensors):
        name = f"{kind}_{re.sub(r'[^a-zA-Z0-9]+', '_', tensor.name[:60])}"
        names.append(f"{kind}{number}" if name in names else name)
    return names


@dataclass(frozen=True)
class CModel:
    """A Program to write as C. name: identifier that all its C names begin with. memory_map: locations of its
    tensors."""

    name: str
    program: Program
    memory_map: MemoryMap

    @property
    def upper(self) -> str:
        """Prefix of macros: the name in capitals; a name with capitals as it is, so that `Net` and `net` differ."""
        if self.name == self.name.lower():
            return self.name.upper()
        return f"{self.name}_model" if self.name == self.name.upper() else self.name

    def parameters(self) -> str:
        """Return the C parameters of the entry function NAME_run, with the types of the tensors."""
        ins = zip(self.program.inputs, parameter_names(self.program.inputs, "in"))
        outs = zip(self.program.outputs, parameter_names(self.program.outputs, "out"))
        parameters = [f"const {C_TYPES[tensor.dtype]} *{name}" for tensor, name in ins]
        return ", ".join([f"{self.name} *self", *parameters, *(f"{C_TYPES[t.dtype]} *{name}" for t, name in outs)])

    def header(self) -> str:
        """Return the text of NAME.h."""
        program, name, upper = self.program, self.name, self.upper
        tensors = [f"   {kind} {number}: {_comment(tensor.name)}, {program.shape_text(tensor)}, {nbytes(tensor)} bytes"
                   for kind, group in (("input", program.inputs), ("output", program.outputs))
                   for number, tensor in enumerate(group)]  # fmt: skip
        return f"""/* Model {_comment(program.name)} for Config {_comment(program.config.name)}, by `celosia export`.

{chr(10).join(tensors)}
*/
#ifndef {upper}_H
#define {upper}_H

#include "celosia.h"

#define {upper}_INPUTS {len(program.inputs)}
#define {upper}_OUTPUTS {len(program.outputs)}
#define {upper}_INPUT_BYTES {_size_initialiser(program.inputs)}
#define {upper}_OUTPUT_BYTES {_size_initialiser(program.outputs)}
#define {upper}_DEVICE_BYTES {self.device_bytes()} /* that a device must have */
#define {upper}_MEMORY_BYTES {max(self.memory_map.memory_bytes, ALIGN)}

#ifdef __cplusplus
#define {upper}_ALIGNED alignas({ALIGN})
extern "C" {{
#else
#define {upper}_ALIGNED _Alignas({ALIGN})
#endif

/* All that the model changes. It lies at a multiple of {ALIGN} bytes; one instance does one run at a time. */
typedef struct {{
    celosia_state state;
    {upper}_ALIGNED uint8_t memory[{upper}_MEMORY_BYTES];
}} {name};

/* Puts weights and instructions into the device's memory, which is the instance's until `{name}_close`. The device must
   stay where it is as long. Codes are those of celosia.h, 0 where all is well. */
int {name}_open({name} *self, const celosia_device *device);

/* One inference. Tensors are in order, as ONNX has them, and do not overlap. */
int {name}_run({self.parameters()});

/* The same for tensors whose sizes, in bytes, are compared with the model's first. */
int {name}_run_sized({name} *self, const void *const *inputs, const size_t *input_bytes, void *const *outputs,
                     const size_t *output_bytes);

/* Ends a run that is still under way. */
int {name}_close({name} *self);

#ifdef __cplusplus
}}
#endif

#endif
"""

    def device_bytes(self) -> int:
        """Return the bytes of device memory that the model needs; 0 without launches."""
        return self.program.dram_size if self.program.launches else 0

    def source(self) -> str:
        """Return the text of NAME.c."""
        program, name, upper = self.program, self.name, self.upper
        return f"""#include "{name}.h"

{chr(10).join(self._declaration_lines())}

static const celosia_image {name}_in_device = {{
    {program.config.identity:#x}u, {sources_identity():#x}u, {upper}_DEVICE_BYTES, {program.image_address}u,
    {self.image_bytes()}u, {name}_image,
}};

{chr(10).join(self._form_lines())}

static int {name}_step_lines({name} *self, const uint8_t *const *in, uint8_t *const *out) {{
    celosia_state *state = &self->state;
    uint8_t *memory = self->memory;
    int code = 0;
    (void)state, (void)memory, (void)in, (void)out;
{chr(10).join(self._step_lines())}
    return code;
}}

/* No member of an instance that lies elsewhere may be touched. */
static int {name}_is_aligned(const void *self) {{ return (uintptr_t)self % {ALIGN} == 0; }}

int {name}_open({name} *self, const celosia_device *device) {{
    if (!{name}_is_aligned(self)) return CELOSIA_UNALIGNED_INSTANCE;
    return celosia_open(&self->state, device, &{name}_in_device);
}}

int {name}_run_sized({name} *self, const void *const *inputs, const size_t *input_bytes, void *const *outputs,
                     const size_t *output_bytes) {{
    static const size_t in_bytes[] = {upper}_INPUT_BYTES, out_bytes[] = {upper}_OUTPUT_BYTES;
    const uint8_t *in[{upper}_INPUTS + 1];
    uint8_t *out[{upper}_OUTPUTS + 1];
    if (!{name}_is_aligned(self)) return CELOSIA_UNALIGNED_INSTANCE;
    if (!self->state.device) return CELOSIA_NOT_OPEN;
    int code = celosia_check(inputs, input_bytes, in_bytes, {upper}_INPUTS, CELOSIA_INPUT_SIZE);
    for (int i = 0; i < {upper}_INPUTS; i++) in[i] = inputs[i];
    for (int i = 0; i < {upper}_OUTPUTS; i++) out[i] = outputs[i];
    const void *const *given = (const void *const *)outputs;
    if (!code) code = celosia_check(given, output_bytes, out_bytes, {upper}_OUTPUTS, CELOSIA_OUTPUT_SIZE);
    if (code) return code;
    self->state.cycles = 0;
    return {name}_step_lines(self, in, out);
}}

{self._typed_entry()}

int {name}_close({name} *self) {{
    return {name}_is_aligned(self) ? celosia_close(&self->state) : CELOSIA_UNALIGNED_INSTANCE;
}}
"""

    def _typed_entry(self) -> str:
        """Return the C code of NAME_run: it passes typed tensors to NAME_run_sized."""
        ins, outs = parameter_names(self.program.inputs, "in"), parameter_names(self.program.outputs, "out")
        name, upper = self.name, self.upper
        return f"""int {name}_run({self.parameters()}) {{
    static const size_t bytes_in[] = {upper}_INPUT_BYTES, bytes_out[] = {upper}_OUTPUT_BYTES;
    const void *inputs[] = {{{", ".join(ins) or "0"}}};
    void *outputs[] = {{{", ".join(outs) or "0"}}};
    return {name}_run_sized(self, inputs, bytes_in, outputs, bytes_out);
}}"""

    def image_bytes(self) -> int:
        """Return the bytes of constants and instructions in device memory; 0 without launches."""
        return len(self.program.image) if self.program.launches else 0

    def data(self) -> str:
        """Return the text of NAME_celosia.c: the initial content of device memory, and the constants of CPU steps."""
        image = self.program.image if self.program.launches else self.program.image[:0]
        return "\n".join(
            [
                "#include <stdint.h>",
                "",
                *_array_text(f"{self.name}_image", image.view(np.uint8)),
                "",
                *_array_text(f"{self.name}_constants", self.memory_map.constants),
                "",
            ]
        )

    def _declaration_lines(self) -> Iterator[str]:
        """Yield C declarations of the data and kernels that other files define."""
        yield f"extern const uint64_t {self.name}_image[], {self.name}_constants[];"
        for number, kernel in enumerate(self.program.kernels):
            yield (
                f"extern void {self.name}_kernel_{number}(const void *const *arguments, int64_t part, int64_t parts) "
                f'__asm__("{kernel.name}");'
            )

    def _form_lines(self) -> Iterator[str]:
        """Yield C constants that describe how each launch packs and unpacks its tensors."""
        for number, launch in enumerate(self.program.launches):
            moves: list[tuple[str, int, Pack | Unpack]] = [("pack", k, pack) for k, pack in enumerate(launch.pack)]
            moves += [("unpack", k, unpack) for k, unpack in enumerate(launch.unpack)]
            for kind, k, move in moves:
                form = form_of(self.program.config, move, self.program.info(move.value))
                yield f"static const celosia_form {self.name}_{kind}_{number}_{k} = {form.c()};"

    def _step_lines(self) -> Iterator[str]:
        """Yield the C code of all steps of a run, in order, and of copies to outputs that lie elsewhere."""
        launches = 0
        for step in self.program.steps:
            if isinstance(step, LaunchStep):
                yield from self._launch_lines(launches, step)
                launches += 1
            elif isinstance(step, CpuStep) and step.kernel is not None:
                yield from self._kernel_call(step, step.kernel, self.program.kernels[step.kernel])
            elif isinstance(step, CpuStep):
                yield from self._copy_if_elsewhere(step.outputs[0], step.inputs[0])
        for number, tensor in enumerate(self.program.outputs):
            if self.memory_map[tensor.name] != (location := Location("out", number)):
                yield self._copy_call(location, self.memory_map[tensor.name], tensor)

    def _launch_lines(self, number: int, step: LaunchStep) -> Iterator[str]:
        """Yield the C code of a launch: pack inputs, run, unpack outputs."""
        yield f"    /* launch {number}: {len(step.layers)} layers, {step.count} instructions */"
        for k, pack in enumerate(step.pack):
            value = self._tensor_address(pack.value)
            yield f"    celosia_pack(state, &{self.name}_pack_{number}_{k}, {pack.address}u, {value});"
        yield f"    code = celosia_launch(state, &{self.name}_in_device, {step.address}u, {step.count}u);"
        yield "    if (code) return code;"
        for k, unpack in enumerate(step.unpack):
            form = f"&{self.name}_unpack_{number}_{k}"
            yield f"    celosia_unpack(state, {form}, {unpack.address}u, {self._tensor_address(unpack.value)});"

    def _kernel_call(self, step: CpuStep, number: int, kernel: CompiledKernel) -> Iterator[str]:
        """Yield the C code that calls a kernel; operands that it changes in place are copied to its outputs before."""
        yield f"    /* {', '.join(f'{node.op} {_comment(node.name)}' for node in step.nodes)} */"
        inputs = [name for name in step.inputs if name]
        for output_number, input_number in kernel.in_place:
            yield from self._copy_if_elsewhere(step.outputs[output_number], inputs[input_number])
        arguments = [self._tensor_address(name) for name in (*inputs, *step.outputs)]
        arguments.append(f"memory + {self.memory_map.workspace}" if kernel.workspace_bytes else "memory")
        yield f"    {self.name}_kernel_{number}((const void *const[]){{{', '.join(arguments)}}}, 0, 1);"

    def _copy_if_elsewhere(self, to: str, source: str) -> Iterator[str]:
        """Yield the C code that copies tensor `source` to tensor `to`, unless both have one location."""
        if self.memory_map[to] != self.memory_map[source]:
            yield self._copy_call(self.memory_map[to], self.memory_map[source], self.program.tensors[to])

    def _copy_call(self, to: Location, source: Location, tensor: TensorInfo) -> str:
        """Return the C code that copies the bytes of `tensor` from one location to another."""
        return f"    memcpy({self._location_address(to)}, {self._location_address(source)}, {nbytes(tensor)}u);"

    def _tensor_address(self, tensor: str) -> str:
        return self._location_address(self.memory_map[tensor])

    def _location_address(self, location: Location) -> str:
        """Return the C expression of a location's address."""
        if location.area == "memory":
            return f"memory + {location.at}"
        if location.area == "constants":
            return f"(const uint8_t *){self.name}_constants + {location.at}"
        return f"{location.area}[{location.at}]"


def _size_initialiser(tensors: tuple[TensorInfo, ...]) -> str:
    """Return the C initialiser of an array of the tensors' sizes in bytes; of one 0 for no tensors."""
    return "{" + (", ".join(str(nbytes(tensor)) for tensor in tensors) or "0") + "}"


def _comment(text: str) -> str:
    """Return a name from the model for use in a C comment, without characters that could end the comment."""
    return re.sub(r"[^\w.:/\-\[\] ]|/(?=\*)|(?<=\*)/", "_", text, flags=re.ASCII)[:120]


def _array_text(name: str, data: NDArray[np.uint8]) -> Iterator[str]:
    """Yield the C definition of an array of bytes, as at least one 64-bit word: compilers parse words faster than
    bytes."""
    padded_size = max(-(-len(data) // 8) * 8, 8)
    words = np.concatenate([data, np.zeros(padded_size - len(data), np.uint8)]).view("<u8")
    yield f"extern const uint64_t {name}[];"
    yield f"_Alignas({ALIGN}) const uint64_t {name}[] = {{"
    for start in range(0, len(words), WORDS_PER_LINE):
        yield "    " + ", ".join(f"0x{word:x}u" for word in words[start : start + WORDS_PER_LINE].tolist()) + ","
    yield "};"
