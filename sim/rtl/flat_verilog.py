"""Parse flat Verilog as Yosys writes it: what each statement reads and writes, and under which conditions.

For gating.py, which moves logic into the conditions of the registers that need it, so that the simulator skips it.
An atom is a condition in its simplest form: a signal, one bit of it, or the negation of either.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

WIDE = 64
"""Bits up to which a variable is one C++ number. Wider automatic variables would be cleared in every call."""

Path = tuple[str, ...]
"""Nested conditions around a statement, the outermost first; () is outside of all."""

_NAME = re.compile(r"\\(\S+) |(?<![\w'$\\.])([A-Za-z_][\w$]*)")
_KEYWORDS = frozenset(["always", "posedge", "if", "else", "begin", "end"])
_ATOM = re.compile(r"(!?) *(?:\\(\S+) |([A-Za-z_][\w$]*)) *(\[\d+\])? *")
ZERO = re.compile(r"\d+'(?:h0+|d0)")
_SLICES = re.compile(r"(\\\S+ )|\[[^\]]*\]")  # an escaped name may end in brackets of its own
_IF = re.compile(r" *if \(([^()]*)\) ?(.*)")
_ELSE_IF = re.compile(r"    else if \(([^()]*)\) ?(.*)")
_WRITE = re.compile(r" *(?:\\(\S+) |([A-Za-z_][\w$]*)) *\[(.*)\]\[(\d+:\d+|\d+)\] <= (.*);")
_A_NAME = r"(\\\S+ |[A-Za-z_][\w$]*)"
_WIDTH = re.compile(rf"^  (?:wire|reg) (?:\[(\d+):0\] )?{_A_NAME};", re.M)
_SHIFT = re.compile(rf"^  assign {_A_NAME} = {_A_NAME} >> \{{ 1'h0, {_A_NAME}, (\d+)'h0+ \}};", re.M)
DECLARATION = re.compile(r"  (?:wire|reg) ((?:\[[^\]]*\] )?)(?:\\(\S+) |([A-Za-z_][\w$]*))(.*);")


def names_in(text: str) -> set[str]:
    """Return the names in Verilog text, without their backslashes and without keywords.

    The text must end in a space, as escaped names do.
    """
    names = {escaped or plain for escaped, plain in _NAME.findall(text)}
    return names - _KEYWORDS


def atom_of(text: str) -> str | None:
    """Return the atom that Verilog text is, in a normal form; None if it is a larger expression.

    The form is normal so that gating.py recognises equal conditions of different registers by equal texts.

    >>> atom_of(r"!\\a[0] "), atom_of("a[0]")  # a name that ends in brackets, and a bit
    ('!a[0]', 'a [0]')
    """
    atom = _ATOM.fullmatch(text + " ")
    return f"{atom[1]}{atom[2] or atom[3]}{f' {atom[4]}' if atom[4] else ''}" if atom else None


def base_of(atom: str) -> str:
    """Return the name of an atom's signal."""
    return re.sub(r" \[\d+\]$", "", atom.removeprefix("!"))


def verilog_name(name: str) -> str:
    """Return a name as Verilog spells it: names with special characters begin with a backslash and end in a space."""
    return name if re.fullmatch(r"[A-Za-z_][\w$]*", name) else f"\\{name} "


def word_of(memory: str) -> str:
    """Return the name of the variable in which the parts of an entry of a memory are merged before it is written."""
    return f"\\{memory}.word "


def declare_variable(width: str, name: str) -> str:
    """Return the declaration of a variable. width: in Verilog's form, [high:0] or nothing."""
    high = int(width[1:].partition(":")[0]) if width else 0
    return f"{'automatic' if high < WIDE else 'static'} reg {width}{name};"


def condition_of(atom: str) -> str:
    """Return an atom as a Verilog condition."""
    base = base_of(atom)
    return f"{'!' if atom[0] == '!' else ''}{verilog_name(base)}{atom.removeprefix('!')[len(base) :].lstrip()}"


def select_entries(text: str) -> str:
    r"""Rewrite flat Verilog so that one entry of a wide register is selected instead of shifting the whole register.

    >>> text = ["reg [63:0] t;", "wire [2:0] n;", "wire [7:0] a;", "assign a = t >> { 1'h0, n, 3'h0 };"]
    >>> print(select_entries("".join(f"  {line}\n" for line in text)).splitlines()[-1])
      assign a = t[{ n, 3'h0 } +: 8];
    """
    widths = {name: int(high or 0) + 1 for high, name in _WIDTH.findall(text)}

    def replace_shift(match: re.Match[str]) -> str:
        """Return a shift's assignment as a selection, or as it is unless the widths show that it takes one entry."""
        left, wide, number, zeros = match.groups()
        entry = 1 << int(zeros)
        width = widths.get(left, entry + 1)
        if width > entry or widths.get(wide) != entry << widths.get(number, 0):
            return match[0]
        return f"  assign {left} = {wide}[{{ {number}, {zeros}'h0 }} +: {width}];"

    return _SHIFT.sub(replace_shift, text)


@dataclass(eq=False)
class Assign:
    """A continuous assignment: the texts left and right of `=`, the right one with its semicolon."""

    left: str
    right: str

    @cached_property
    def writes(self) -> set[str]:
        """Names that the assignment writes, wholly or in part."""
        return names_in(_SLICES.sub(r"\1", self.left + " ") + " ")

    @cached_property
    def reads(self) -> set[str]:
        """Names that the assignment reads."""
        return names_in(self.right + " ")


class Register:
    """An always block: a register, or a port of a memory.

    text: its lines. conditions: atoms, one of which holds whenever the block does anything apart from `reset`; none if
    the block is not understood. body: its statements under these conditions. reset: a statement to execute after the
    body in every cycle, or "". local: (memory, width) if the body merges writes to an entry in a variable. path: nested
    conditions to put the block into; gating.py decides.
    """

    def __init__(self, text: list[str], memories: Mapping[str, str]) -> None:
        self.text = text
        self.conditions: list[str] = []
        self.body: list[str] = []
        self.reset = ""
        self.local: tuple[str, str] | None = None
        self.path: Path = ()
        if text[0].endswith("begin"):
            self._read_port(text[1:-1], memories)
        elif condition := _IF.fullmatch(text[1]):
            self._read_conditions(condition[1], [line for line in (condition[2], *text[2:]) if line])

    @property
    def targets(self) -> set[str]:
        """Names that the block writes."""
        return {
            name
            for line in self.text
            if " <= " in line
            for name in names_in(_SLICES.sub(r"\1", line.split(" <= ")[0]) + " ")
        }

    def write_parts_alone(self) -> None:
        """Undo `_merge_writes`: write the parts of an entry one by one, since other blocks write to the memory, too."""
        self.body, self.local = self.text[1:-1], None

    def _read_conditions(self, condition: str, lines: list[str]) -> None:
        """Parse the block of a register: `if (condition)`, or `if (reset)` with `else if (condition)`."""
        else_lines = [number for number, line in enumerate(lines) if line.startswith("    else")]
        if not else_lines and (atom := atom_of(condition)):
            self.conditions, self.body = [atom], lines
        elif (
            len(else_lines) == 1
            and (else_if := _ELSE_IF.fullmatch(lines[else_lines[0]]))
            and (atom := atom_of(else_if[1]))
        ):
            self.reset = f"if ({condition}) {' '.join(line.strip() for line in lines[: else_lines[0]])}"
            self.conditions, self.body = [atom], [line for line in (else_if[2], *lines[else_lines[0] + 1 :]) if line]

    def _read_port(self, lines: list[str], memories: Mapping[str, str]) -> None:
        """Parse the block of a memory's port: a read, or writes of some bits each."""
        condition_lines = [line for line in lines if re.match(r" {4}\S", line) and line != "    end"]
        conditions = [_IF.fullmatch(line.removesuffix("begin")) for line in condition_lines]
        atoms = [atom_of(condition[1]) if condition else None for condition in conditions]
        if all(atoms):
            self.conditions, self.body = [atom for atom in atoms if atom], _compare_once(lines)
            self._merge_writes(lines, memories)

    def _merge_writes(self, lines: list[str], memories: Mapping[str, str]) -> None:
        """Merge writes of parts of a memory's entry into one write of the entry."""
        parts = []
        for condition, line in zip(lines[::2], lines[1::2]):
            guard, part = _IF.fullmatch(condition), _WRITE.fullmatch(line)
            if not guard or guard[2] or not part:
                return
            parts.append((guard[1], part[1] or part[2], part[3], part[4], part[5]))
        if len(lines) % 2 or len({(memory, address) for _, memory, address, _, _ in parts}) != 1:
            return
        _, memory, address, _, _ = parts[0]
        word, entry = word_of(memory), f"{verilog_name(memory)}[{address}]"
        self.local = memory, memories[memory]
        writes = (f"if ({condition}) {word}[{bits}] = {value};" for condition, _, _, bits, value in parts)
        self.body = [f"{word} = {entry};", *writes, f"{entry} <= {word};"]


def _compare_once(lines: list[str]) -> list[str]:
    """Rewrite a read that forwards parts of an entry written in the same cycle: compare the addresses once for all."""
    tests = [re.fullmatch(r"      if \((.*) && (\S.* == \S.*)\)", line) for line in lines]
    compares = [test[2] for test in tests if test]
    if len(compares) < 2 or len(set(compares)) != 1:
        return lines
    first = next(number for number, test in enumerate(tests) if test)
    last = max(number for number, test in enumerate(tests) if test) + 1
    inner = [f"      if ({test[1]})" if test else line for test, line in zip(tests, lines)]
    return [
        *lines[:first],
        f"      if ({compares[0]}) begin",
        *inner[first : last + 1],
        "      end",
        *lines[last + 1 :],
    ]


def _statements(text: str) -> Iterator[list[str]]:
    """Yield the lines of each statement of a module."""
    statement: list[str] = []
    for line in text.split("\n"):
        first = statement[0] if statement else ""
        continues = (
            first.startswith("  always ") and (line.startswith("    ") or (first.endswith("begin") and line == "  end"))
        ) or (first.startswith("  function ") and not statement[-1].startswith("  endfunction"))
        if statement and not continues:
            yield statement
            statement = []
        statement.append(line)
    yield statement


class Module:
    """A flat module, statement by statement.

    statements: all of them in order; text stands for a statement that stays as it is. registers: the always blocks.
    assigns: the assignments whose result is needed.
    """

    def __init__(self, text: str) -> None:
        self.statements: list[str | Assign | Register] = []
        self.wires: dict[str, str] = {}
        """Width of each wire, in Verilog's form, [high:0] or nothing."""
        self.memories: dict[str, str] = {}
        """Width of the entries of each memory, in the same form."""
        self.fixed: set[str] = set()
        """Names that are used outside of assignments and registers: ports, and all names in lines not understood."""
        for lines in _statements(text):
            self.statements.append(self._parse_statement(lines))
        self.registers = [statement for statement in self.statements if isinstance(statement, Register)]
        written = Counter(name for register in self.registers for name in register.targets & self.memories.keys())
        for register in self.registers:
            if register.local and written[register.local[0]] > 1:
                register.write_parts_alone()
        self.assigns = self._keep_used([statement for statement in self.statements if isinstance(statement, Assign)])

    def _parse_statement(self, lines: list[str]) -> str | Assign | Register:
        """Return a parsed assignment or always block, else the text. Records wires, memories and fixed names."""
        text = "\n".join(lines)
        if text.startswith("  assign "):
            return Assign(*text[9:].split(" = ", 1))
        if text.startswith("  always @(posedge "):
            return Register(lines, self.memories)
        if declaration := DECLARATION.fullmatch(text):
            if text.startswith("  wire "):
                self.wires[declaration[2] or declaration[3]] = declaration[1]
            elif declaration[4].strip():
                self.memories[declaration[2] or declaration[3]] = declaration[1]
        elif not text.startswith(("  (*", "  function ", "endmodule")):
            self.fixed |= names_in(text + " ")
        return text

    def _keep_used(self, assigns: list[Assign]) -> list[Assign]:
        """Return the assignments whose result some register, memory or output needs."""
        outside = self.fixed.union(*(names_in("\n".join(register.text) + " ") for register in self.registers))
        while True:
            read = outside.union(*(assign.reads for assign in assigns))
            alive = [assign for assign in assigns if assign.writes & read]
            if len(alive) == len(assigns):
                return alive
            assigns = alive
