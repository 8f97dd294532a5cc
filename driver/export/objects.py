"""Undefined symbols and code size of object files, in ELF and WebAssembly."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SYMBOLS, _EXECUTABLE = 2, 4
"""ELF: type of a section of symbols; flag of a section of instructions."""
_IMPORTS, _CODE, _FUNCTION = 2, 10, 0
"""WebAssembly: numbers of sections; kind of an import that is a function."""


def undefined_symbols(code: bytes) -> set[str]:
    """Names that the object `code` uses and does not define. ValueError where it is neither ELF nor WebAssembly."""
    if code[:4] == b"\x7fELF":
        return set(_undefined_in_elf(code))
    if code[:4] == b"\0asm":
        return set(_undefined_in_wasm(code))
    raise ValueError(f"an object begins with {code[:4]!r}: neither ELF nor WebAssembly")


def count_code_bytes(code: bytes) -> int:
    """Bytes of instructions in the object `code`, in a format that `undefined_symbols` reads."""
    if code[:4] == b"\0asm":
        return sum(end - start for kind, start, end in _wasm_sections(code) if kind == _CODE)
    return sum(length for _, kind, flags, _, _, length, *_ in _elf_sections(code) if kind == 1 and flags & _EXECUTABLE)


def _elf_sections(code: bytes) -> list[tuple[int, ...]]:
    """Yield (name, kind, flags, address, offset, size, link, ...) of each section."""
    wide = code[4] == 2
    table, size, count = (_unpack_at(code, *place) for place in (_WIDE if wide else _NARROW))
    section = struct.Struct("<IIQQQQIIQQ" if wide else "<IIIIIIIIII")
    return [section.unpack_from(code, table + number * size) for number in range(count)]


def _undefined_in_elf(code: bytes) -> Iterator[str]:
    """Yield the undefined symbols of an ELF object."""
    wide = code[4] == 2
    sections = _elf_sections(code)
    symbol = struct.Struct("<IBBHQQ" if wide else "<IIIBBH")
    place = 3 if wide else 5  # index of the section that defines the symbol
    for _, kind, _, _, start, length, link, *_ in sections:
        if kind == _SYMBOLS:
            names = sections[link][4]
            for at in range(start, start + length, symbol.size):
                fields = symbol.unpack_from(code, at)
                if fields[place] == 0 and fields[0]:
                    begin = names + fields[0]
                    yield code[begin : code.index(b"\0", begin)].decode()


_WIDE = ("<Q", 40), ("<H", 58), ("<H", 60)
_NARROW = ("<I", 32), ("<H", 46), ("<H", 48)
"""Fields of the head of an object for its table of sections: place, size of an entry, count."""


def _unpack_at(code: bytes, form: str, at: int) -> int:
    (value,) = struct.unpack_from(form, code, at)
    return int(value)


def _wasm_sections(code: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (kind, first byte, end) of each section."""
    reader = _Wasm(code)
    while reader.at < len(code):
        kind, length = reader.byte(), reader.number()
        yield kind, reader.at, reader.at + length
        reader.at += length


def _undefined_in_wasm(code: bytes) -> Iterator[str]:
    """Functions that the module imports, from its list of (module, name, kind, description)."""
    for section, start, _ in _wasm_sections(code):
        if section == _IMPORTS:
            reader = _Wasm(code, start)
            for _ in range(reader.number()):
                reader.text()
                name, kind = reader.text(), reader.byte()
                if kind == _FUNCTION:
                    reader.number()
                    yield name
                else:
                    reader.skip(kind)


class _Wasm:
    """Reader of the numbers and texts of a module."""

    def __init__(self, code: bytes, at: int = 8) -> None:
        self.code, self.at = code, at

    def byte(self) -> int:
        self.at += 1
        return self.code[self.at - 1]

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
        size = self.number()
        self.at += size
        return self.code[self.at - size : self.at].decode()

    def skip(self, kind: int) -> None:
        """Skip the type of a table (1), a memory (2) or a global (3)."""
        if kind == 3:
            self.at += 2
            return
        self.at += kind == 1
        limited = self.byte() & 1
        for _ in range(1 + limited):
            self.number()
