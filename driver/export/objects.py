"""Read object files in ELF and WebAssembly: undefined symbols and code size.

So c_project.py refuses kernels that call functions which a target without an operating system lacks. Benchmarks of
exported models measure code size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SYMBOL_TABLE, _EXECUTABLE = 2, 4
"""ELF: the section type SHT_SYMTAB, and the section flag SHF_EXECINSTR."""
_IMPORT_SECTION, _CODE_SECTION, _FUNCTION_IMPORT = 2, 10, 0
"""WebAssembly: numbers of two sections; the kind of an import that is a function."""


def undefined_symbols(code: bytes) -> set[str]:
    """Return the names that an object file uses and does not define.

    ValueError where it is neither ELF nor WebAssembly.
    """
    if code[:4] == b"\x7fELF":
        return set(_undefined_in_elf(code))
    if code[:4] == b"\0asm":
        return set(_undefined_in_wasm(code))
    raise ValueError(f"an object begins with {code[:4]!r}: neither ELF nor WebAssembly")


def count_code_bytes(code: bytes) -> int:
    """Return the bytes of instructions in an ELF or WebAssembly object file."""
    if code[:4] == b"\0asm":
        return sum(end - start for kind, start, end in _wasm_sections(code) if kind == _CODE_SECTION)
    return sum(length for _, kind, flags, _, _, length, *_ in _elf_sections(code) if kind == 1 and flags & _EXECUTABLE)


def _elf_sections(code: bytes) -> list[tuple[int, ...]]:
    """Return (name, kind, flags, address, offset, size, link, ...) of each section of an ELF object."""
    is_64_bit = code[4] == 2
    table, size, count = (_unpack_at(code, *field) for field in (_HEADER_FIELDS_64 if is_64_bit else _HEADER_FIELDS_32))
    section = struct.Struct("<IIQQQQIIQQ" if is_64_bit else "<IIIIIIIIII")
    return [section.unpack_from(code, table + number * size) for number in range(count)]


def _undefined_in_elf(code: bytes) -> Iterator[str]:
    """Yield the undefined symbols of an ELF object."""
    is_64_bit = code[4] == 2
    sections = _elf_sections(code)
    symbol = struct.Struct("<IBBHQQ" if is_64_bit else "<IIIBBH")
    section_field = 3 if is_64_bit else 5  # field of a symbol: the section that defines it, 0 if undefined
    for _, kind, _, _, start, length, link, *_ in sections:
        if kind == _SYMBOL_TABLE:
            names_start = sections[link][4]
            for offset in range(start, start + length, symbol.size):
                fields = symbol.unpack_from(code, offset)
                if fields[section_field] == 0 and fields[0]:
                    begin = names_start + fields[0]
                    yield code[begin : code.index(b"\0", begin)].decode()


_HEADER_FIELDS_64 = ("<Q", 40), ("<H", 58), ("<H", 60)
_HEADER_FIELDS_32 = ("<I", 32), ("<H", 46), ("<H", 48)
"""ELF header fields on the section table, as (struct format, offset): its offset, the size of an entry, their
number."""


def _unpack_at(code: bytes, field_format: str, offset: int) -> int:
    """Read an integer with a struct format at a byte offset."""
    (value,) = struct.unpack_from(field_format, code, offset)
    return int(value)


def _wasm_sections(code: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (kind, offset of the first byte, offset of the end) of each section of a WebAssembly module."""
    reader = _WasmReader(code)
    while reader.offset < len(code):
        kind, length = reader.byte(), reader.number()
        yield kind, reader.offset, reader.offset + length
        reader.offset += length


def _undefined_in_wasm(code: bytes) -> Iterator[str]:
    """Yield the functions that a WebAssembly module imports, from its list of (module, name, kind, description)."""
    for section, start, _ in _wasm_sections(code):
        if section == _IMPORT_SECTION:
            reader = _WasmReader(code, start)
            for _ in range(reader.number()):
                reader.text()
                name, kind = reader.text(), reader.byte()
                if kind == _FUNCTION_IMPORT:
                    reader.number()
                    yield name
                else:
                    reader.skip(kind)


class _WasmReader:
    """Reads numbers and texts of a WebAssembly module one after the other. offset: of the next byte."""

    def __init__(self, code: bytes, offset: int = 8) -> None:
        self.code, self.offset = code, offset

    def byte(self) -> int:
        """Read a byte."""
        self.offset += 1
        return self.code[self.offset - 1]

    def number(self) -> int:
        """Read a LEB128 number of any length: seven bits in each byte."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def text(self) -> str:
        """Read a UTF-8 text, such as the name of an import, which its length precedes."""
        size = self.number()
        self.offset += size
        return self.code[self.offset - size : self.offset].decode()

    def skip(self, kind: int) -> None:
        """Skip the type of a table (1), a memory (2) or a global (3)."""
        if kind == 3:
            self.offset += 2
            return
        self.offset += kind == 1
        has_maximum = self.byte() & 1
        for _ in range(1 + has_maximum):
            self.number()
