"""Verilog that a simulator runs faster: what nobody looks at in a cycle is not computed in it.

Yosys writes a flat module as continuous assignments and registers with enables. A simulator evaluates all of the former
in every cycle, though most of their values end in registers that stay as they are: the vector unit's lanes are idle in
nine cycles of ten. Here assignments move into the conditions of the registers that alone use them:

    assign sum = a + b;                            task automatic gated0;
    always @(posedge clk)                 ->         if (enable) begin
      if (enable) total <= sum;                        automatic reg [8:0] sum;
                                                       sum = a + b;
                                                       total <= sum;
                                                     end
                                                   endtask
                                                   always @(posedge clk) begin
                                                     gated0;
                                                   end

Nothing else changes: registers get the same values in the same cycles. Statements that are not of the forms known here
stay where they are. A condition holds others: where `enable` is `valid & move`, logic that several such enables share
stands in `if (valid)`. What up to COPIES groups of registers use is written once in each of them. Variables of a task
become those of a C++ function, which need no place in memory; those of an always block would be stored each time.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

COPIES = 4
"""Groups of registers that may each have their own copy of what they share."""
WIDE = 64
"""Bits up to which a number is one to C++. Wider ones would be set to 0 before the condition is known, if automatic."""

Path = tuple[str, ...]
"""Conditions, the outermost first, within which something stands; () is outside of all."""

_NAME = re.compile(r"\\(\S+) |(?<![\w'$\\.])([A-Za-z_][\w$]*)")
_KEYWORDS = frozenset(["always", "posedge", "if", "else", "begin", "end"])
_ATOM = re.compile(r"(!?) *(?:\\(\S+) |([A-Za-z_][\w$]*)) *(\[\d+\])? *")
_ZERO = re.compile(r"\d+'(?:h0+|d0)")
_SLICES = re.compile(r"\[[^\]]*\]")
_IF = re.compile(r" *if \(([^()]*)\) ?(.*)")
_ELSE_IF = re.compile(r"    else if \(([^()]*)\) ?(.*)")
_WRITE = re.compile(r" *(?:\\(\S+) |([A-Za-z_][\w$]*)) *\[(.*)\]\[(\d+:\d+|\d+)\] <= (.*);")
_DECLARATION = re.compile(r"  (?:wire|reg) ((?:\[[^\]]*\] )?)(?:\\(\S+) |([A-Za-z_][\w$]*))(.*);")


def _names(text: str) -> set[str]:
    found = {escaped or plain for escaped, plain in _NAME.findall(text)}
    return found - _KEYWORDS


def _atom(text: str) -> str | None:
    """A name, a bit of it, or the negation of one of them, in a normal form; None for all else."""
    found = _ATOM.fullmatch(text + " ")
    return f"{found[1]}{found[2] or found[3]}{found[4] or ''}" if found else None


def _base(atom: str) -> str:
    return re.sub(r"\[\d+\]$", "", atom.removeprefix("!"))


def _written(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][\w$]*", name) else f"\\{name} "


def _word(memory: str) -> str:
    """The variable for an entry of a memory that is being put together."""
    return f"\\{memory}.word "


def _variable(width: str, name: str) -> str:
    """The declaration of a variable; width: as Verilog has it, [high:0] or nothing."""
    high = int(width[1:].partition(":")[0]) if width else 0
    return f"{'automatic' if high < WIDE else 'static'} reg {width}{name};"


def _condition(atom: str) -> str:
    """An atom as Verilog."""
    base = _base(atom)
    return f"{'!' if atom[0] == '!' else ''}{_written(base)}{atom.removeprefix('!')[len(base) :]}"


@dataclass(eq=False)
class _Assign:
    left: str
    right: str

    @cached_property
    def writes(self) -> set[str]:
        return _names(_SLICES.sub("", self.left) + " ")

    @cached_property
    def reads(self) -> set[str]:
        return _names(self.right + " ")


class _Register:
    """An always block.

    conditions: one of them holds where the block does anything, but for `reset`, which is done later in any case. body:
    what is done where the condition holds. local: a memory, an entry of which is a variable of the body, and its width.
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
        elif found := _IF.fullmatch(text[1]):
            self._read_conditions(found[1], [line for line in (found[2], *text[2:]) if line])

    @property
    def targets(self) -> set[str]:
        """Names of what it writes."""
        return {
            name
            for line in self.text
            if " <= " in line
            for name in _names(_SLICES.sub("", line.split(" <= ")[0]) + " ")
        }

    def apart(self) -> None:
        """Write the parts of a memory's entry one by one: others write it, too."""
        self.body, self.local = self.text[1:-1], None

    def _read_conditions(self, condition: str, lines: list[str]) -> None:
        """if (condition) ..., or if (reset) ... else if (condition) ..."""
        others = [number for number, line in enumerate(lines) if line.startswith("    else")]
        if not others and (atom := _atom(condition)):
            self.conditions, self.body = [atom], lines
        elif len(others) == 1 and (found := _ELSE_IF.fullmatch(lines[others[0]])) and (atom := _atom(found[1])):
            self.reset = f"if ({condition}) {' '.join(line.strip() for line in lines[: others[0]])}"
            self.conditions, self.body = [atom], [line for line in (found[2], *lines[others[0] + 1 :]) if line]

    def _read_port(self, lines: list[str], memories: Mapping[str, str]) -> None:
        """A port of a memory: a read, or writes of some bits each."""
        outer = [line for line in lines if re.match(r" {4}\S", line) and line != "    end"]
        found = [_IF.fullmatch(line.removesuffix("begin")) for line in outer]
        atoms = [_atom(each[1]) if each else None for each in found]
        if all(atoms):
            self.conditions, self.body = [atom for atom in atoms if atom], _one_compare(lines)
            self._write_once(lines, memories)

    def _write_once(self, lines: list[str], memories: Mapping[str, str]) -> None:
        """Writes of parts of a memory's entry become one write of the entry."""
        parts = []
        for condition, line in zip(lines[::2], lines[1::2]):
            found, part = _IF.fullmatch(condition), _WRITE.fullmatch(line)
            if not found or found[2] or not part:
                return
            parts.append((found[1], part[1] or part[2], part[3], part[4], part[5]))
        if len(lines) % 2 or len({(memory, address) for _, memory, address, _, _ in parts}) != 1:
            return
        _, memory, address, _, _ = parts[0]
        word, entry = _word(memory), f"{_written(memory)}[{address}]"
        self.local = memory, memories[memory]
        writes = (f"if ({condition}) {word}[{bits}] = {value};" for condition, _, _, bits, value in parts)
        self.body = [f"{word} = {entry};", *writes, f"{entry} <= {word};"]


def _one_compare(lines: list[str]) -> list[str]:
    """What an entry becomes that is written while it is read: its address is compared once for all parts."""
    found = [re.fullmatch(r"      if \((.*) && (\S.* == \S.*)\)", line) for line in lines]
    compares = [each[2] for each in found if each]
    if len(compares) < 2 or len(set(compares)) != 1:
        return lines
    first = next(number for number, each in enumerate(found) if each)
    last = max(number for number, each in enumerate(found) if each) + 1
    inner = [f"      if ({each[1]})" if each else line for each, line in zip(found, lines)]
    return [
        *lines[:first],
        f"      if ({compares[0]}) begin",
        *inner[first : last + 1],
        "      end",
        *lines[last + 1 :],
    ]


def _statements(text: str) -> Iterator[list[str]]:
    """The lines of each statement."""
    statement: list[str] = []
    for line in text.split("\n"):
        first = statement[0] if statement else ""
        goes_on = (
            first.startswith("  always ") and (line.startswith("    ") or (first.endswith("begin") and line == "  end"))
        ) or (first.startswith("  function ") and not statement[-1].startswith("  endfunction"))
        if statement and not goes_on:
            yield statement
            statement = []
        statement.append(line)
    yield statement


class _Module:
    """A flat module, statement by statement."""

    def __init__(self, text: str) -> None:
        self.statements: list[str | _Assign | _Register] = []
        self.wires: dict[str, str] = {}
        """Their widths, as Verilog has them."""
        self.memories: dict[str, str] = {}
        self.fixed: set[str] = set()
        """Names that are used outside: ports, and all in lines that are not understood."""
        for lines in _statements(text):
            self.statements.append(self._statement(lines))
        self.registers = [each for each in self.statements if isinstance(each, _Register)]
        written = Counter(name for register in self.registers for name in register.targets & self.memories.keys())
        for register in self.registers:
            if register.local and written[register.local[0]] > 1:
                register.apart()
        self.assigns = self._alive([each for each in self.statements if isinstance(each, _Assign)])

    def _statement(self, lines: list[str]) -> str | _Assign | _Register:
        text = "\n".join(lines)
        if text.startswith("  assign "):
            return _Assign(*text[9:].split(" = ", 1))
        if text.startswith("  always @(posedge "):
            return _Register(lines, self.memories)
        if found := _DECLARATION.fullmatch(text):
            if text.startswith("  wire "):
                self.wires[found[2] or found[3]] = found[1]
            elif found[4].strip():
                self.memories[found[2] or found[3]] = found[1]
        elif not text.startswith(("  (*", "  function ", "endmodule")):
            self.fixed |= _names(text + " ")
        return text

    def _alive(self, assigns: list[_Assign]) -> list[_Assign]:
        """Those that somebody reads in the end."""
        outside = self.fixed.union(*(_names("\n".join(register.text) + " ") for register in self.registers))
        while True:
            read = outside.union(*(assign.reads for assign in assigns))
            alive = [assign for assign in assigns if assign.writes & read]
            if len(alive) == len(assigns):
                return alive
            assigns = alive


class _Gating:
    """Which statement of a module stands in which conditions."""

    def __init__(self, module: _Module) -> None:
        self.module = module
        self.drivers: defaultdict[str, list[_Assign]] = defaultdict(list)
        for assign in module.assigns:
            for name in assign.writes:
                self.drivers[name].append(assign)
        self._closures: dict[str, set[str]] = {}
        self._place_registers()
        self.paths, self.order = self._place_assigns()

    def implied(self, atom: str) -> set[str]:
        """`atom`, and what is true wherever it is."""
        if atom not in self._closures:
            self._closures[atom] = {atom}  # also where a definition comes back to it
            self._closures[atom] |= {more for each in self._defined(atom) for more in self.implied(each)}
        return self._closures[atom]

    def _defined(self, atom: str) -> list[str]:
        """Atoms that hold together where `atom` does, by its definition."""
        base = _base(atom)
        drivers = self.drivers[base]
        if atom[0] == "!" or len(drivers) != 1 or _atom(drivers[0].left) != base:
            return []
        right = drivers[0].right.removesuffix(";")
        if " ? " in right:
            condition, _, rest = right.partition(" ? ")
            value, _, other = rest.rpartition(" : ")
            parts = [condition] if "?" not in value and _ZERO.fullmatch(other.strip()) else []
        elif atom != base:
            parts = []  # a bit of something wide
        elif together := re.fullmatch(r"& \{ (.*) \}", right):
            return [each for part in together[1].split(", ") if (each := _atom(part))]
        else:
            parts = re.split(r" +&&? +", right)
        atoms = [each for part in parts if (each := _atom(part))]
        return atoms if len(atoms) == len(parts) else []

    def _place_registers(self) -> None:
        registers = self.module.registers
        clock = Counter(each.text[0].removesuffix(" begin") for each in registers).most_common(1)
        common: dict[_Register, set[str]] = {
            each: set.intersection(*map(self.implied, each.conditions)) for each in registers
            if each.conditions and each.text[0].removesuffix(" begin") == clock[0][0]
        }  # fmt: skip
        popular = Counter(atom for atoms in common.values() for atom in atoms)

        def closest(atoms: Iterable[str]) -> str:
            """The one that says most, and of these the one that stands in fewest registers' conditions."""
            return max(atoms, key=lambda atom: (len(self.implied(atom)), -popular[atom], atom))

        def path(atom: str) -> Path:
            outer = {each for each in self.implied(atom) if atom not in self.implied(each)}
            return (*path(closest(outer)), atom) if outer else (atom,)

        for each, atoms in common.items():
            if atoms:
                each.path = path(closest(atoms))

    def _used(self) -> dict[str, set[Path]]:
        """By name, where registers and conditions use it."""
        used: defaultdict[str, set[Path]] = defaultdict(set)
        for name in self.module.fixed:
            used[name].add(())
        for register in self.module.registers:
            for name in _names("\n".join(register.body if register.path else register.text) + " "):
                used[name].add(register.path)
            for name in _names(register.reset + " "):
                used[name].add(())
            for depth, atom in enumerate(register.path):
                used[_base(atom)].add(register.path[:depth])
        return used

    def _place_assigns(self) -> tuple[dict[int, set[Path]], list[_Assign]]:
        """For each assignment where it stands, and those that move in an order in which they can be done.

        Assignments that write parts of one name stay together. They are placed after all that read them; those in
        loops of names, which have no such order, and all in front of them stay outside.
        """
        used, assigns = self._used(), self.module.assigns
        together = _together(assigns)
        readers: defaultdict[str, set[int]] = defaultdict(set)
        members: defaultdict[int, list[_Assign]] = defaultdict(list)
        for assign in assigns:
            members[together[id(assign)]].append(assign)
            for name in assign.reads:
                readers[name].add(together[id(assign)])
        writes = {number: {name for each in parts for name in each.writes} for number, parts in members.items()}
        waiting = {number: {r for name in names for r in readers[name]} for number, names in writes.items()}
        inputs: defaultdict[int, set[int]] = defaultdict(set)
        for number, after in waiting.items():
            for reader in after:
                inputs[reader].add(number)
        found: dict[int, set[Path]] = {}
        order: list[_Assign] = []
        ready = [number for number, after in waiting.items() if not after]
        while ready:
            number = ready.pop()
            names = writes[number]
            paths = {path for name in names for path in used.get(name, ())}
            paths |= {path for name in names for reader in readers[name] for path in found[reader]}
            found[number] = _meet(paths) if names <= self.module.wires.keys() else {()}
            order += reversed(members[number])
            for before in inputs[number]:
                waiting[before].discard(number)
                if not waiting[before]:
                    ready.append(before)
        return {id(assign): found.get(together[id(assign)], {()}) for assign in assigns}, order[::-1]


def _together(assigns: list[_Assign]) -> dict[int, int]:
    """A number for each assignment, the same for those that write parts of one name."""
    number = {id(assign): count for count, assign in enumerate(assigns)}
    first: dict[str, int] = {}
    changed = True
    while changed:
        changed = False
        for assign in assigns:
            lowest = min(number[id(assign)], *(first.get(name, len(assigns)) for name in assign.writes))
            changed |= lowest != number[id(assign)] or any(first.get(name) != lowest for name in assign.writes)
            number[id(assign)] = lowest
            first |= dict.fromkeys(assign.writes, lowest)
    return number


def _meet(paths: set[Path]) -> set[Path]:
    """The innermost places from which all of `paths` can be seen: one for each outermost condition, or outside."""
    meeting: dict[str, Path] = {}
    for path in paths:
        if not path:
            return {()}
        other = meeting.get(path[0], path)
        same = next((n for n, (a, b) in enumerate(zip(path, other)) if a != b), min(len(path), len(other)))
        meeting[path[0]] = path[:same]
    return set(meeting.values()) if len(meeting) <= COPIES else {()}


def gated(text: str) -> str:
    """The flat Verilog module `text` of Yosys, its logic in the conditions of the registers that use it."""
    module = _Module(text)
    gating = _Gating(module)
    assigns: defaultdict[Path, list[_Assign]] = defaultdict(list)
    registers: defaultdict[Path, list[_Register]] = defaultdict(list)
    inner: defaultdict[Path, dict[Path, None]] = defaultdict(dict)
    moved: set[str] = set()
    for assign in gating.order:
        for path in sorted(gating.paths[id(assign)] - {()}):
            assigns[path].append(assign)
            moved |= assign.writes
    for register in module.registers:
        if register.path:
            registers[register.path].append(register)
    for path in (*assigns, *registers):
        for depth in range(len(path)):
            inner[path[:depth]][path[: depth + 1]] = None

    def within(path: Path) -> Iterator[str]:
        yield f"if ({_condition(path[-1])}) begin"
        names = dict.fromkeys(name for assign in assigns[path] for name in sorted(assign.writes))
        parts = {name for assign in assigns[path] if "[" in assign.left for name in assign.writes}
        yield from (f"  {_variable(module.wires[name], _written(name))}" for name in names)
        entries = (register.local for register in registers[path] if register.local)
        yield from (f"  {_variable(width, _word(memory))}" for memory, width in entries)
        # What is written part by part would be random first, which takes long.
        yield from (f"  {_written(name)} = 0;" for name in names if name in parts)
        for assign in assigns[path]:
            yield f"  {assign.left} = {assign.right}"
        for register in registers[path]:
            yield from (f"  {line.strip()}" for line in register.body)
        for more in inner[path]:
            yield from (f"  {line}" for line in within(more))
        yield "end"

    def below(path: Path) -> Iterator[Path]:
        yield path
        for more in inner[path]:
            yield from below(more)

    def group(number: int, path: Path) -> Iterator[str]:
        places = list(below(path))
        blocks = [register for place in places for register in registers[place]]
        yield f"  task automatic gated{number};"
        yield from (f"    {line}" for line in within(path))
        yield "  endtask"
        yield f"{blocks[0].text[0].removesuffix(' begin')} begin"
        yield f"    gated{number};"
        yield from (f"    {register.reset}" for register in blocks if register.reset)
        yield "  end"

    return "\n".join(_lines(module, gating, moved, [group(n, path) for n, path in enumerate(inner[()])]))


def _lines(module: _Module, gating: _Gating, moved: set[str], groups: Iterable[Iterator[str]]) -> Iterator[str]:
    for line in module.statements:
        if isinstance(line, _Assign):
            if () in gating.paths.get(id(line), ()):
                yield f"  assign {line.left} = {line.right}"
        elif isinstance(line, _Register):
            if not line.path:
                yield from line.text
        elif line == "endmodule":
            for each in groups:
                yield from each
            yield line
        elif not ((found := _DECLARATION.fullmatch(line)) and (found[2] or found[3]) in moved):
            yield line
