"""Gate the logic of flat Verilog for faster simulation: what no register needs in a cycle is not computed in it.

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
stands in `if (valid)`. Logic that up to COPIES groups of registers use is copied into each of them. Variables of a task
become those of a C++ function, which need no place in memory; those of an always block would be stored each time.

It reads what Yosys writes as text, by regular expressions, and not Yosys' cells. Those of `pynq` were looked at, at
ce51725: 8,225 cells of 31 types, in 13.7 MB of JSON, which take Yosys 1.4 s of processor time more than their 1.7 MB of
Verilog; to read these and to move statements takes 0.4 s. Who the readers of a cell are is as plain there, but what
moves must be Verilog again: expressions of all 31 types, and ports of memories with what they give while they are
written. That would be a second writer of Verilog beside Yosys' own, and longer than what reads it here.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from celosia.sim.rtl.flat_verilog import (
    DECLARATION,
    ZERO,
    Assign,
    Module,
    Path,
    Register,
    atom_of,
    base_of,
    condition_of,
    declare_variable,
    names_in,
    select_entries,
    verilog_name,
    word_of,
)

COPIES = 4
"""Groups of registers that may each have their own copy of what they share."""


class _Gating:
    """The conditions under which the values of each statement of a module are needed."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.drivers: defaultdict[str, list[Assign]] = defaultdict(list)
        for assign in module.assigns:
            for name in assign.writes:
                self.drivers[name].append(assign)
        self._closures: dict[str, set[str]] = {}
        self._place_registers()
        self.paths, self.order = self._place_assigns()

    def implied(self, atom: str) -> set[str]:
        """Return `atom` and all atoms that are true wherever it is."""
        if atom not in self._closures:
            self._closures[atom] = {atom}  # also where a definition comes back to it
            self._closures[atom] |= {
                implied for defined in self._implied_by_definition(atom) for implied in self.implied(defined)
            }
        return self._closures[atom]

    def _implied_by_definition(self, atom: str) -> list[str]:
        """Return the atoms whose conjunction the assignment of `atom` computes; none if it computes anything else.

        These all hold when `atom` does. Forms: a & b, & { a, b } and a ? b : 0.
        """
        base = base_of(atom)
        drivers = self.drivers[base]
        if atom[0] == "!" or len(drivers) != 1 or atom_of(drivers[0].left) != base:
            return []
        right = drivers[0].right.removesuffix(";")
        if " ? " in right:
            condition, _, rest = right.partition(" ? ")
            value, _, other = rest.rpartition(" : ")
            parts = [condition] if "?" not in value and ZERO.fullmatch(other.strip()) else []
        elif atom != base:
            parts = []  # a bit of something wide
        elif together := re.fullmatch(r"& \{ (.*) \}", right):
            return [operand for part in together[1].split(", ") if (operand := atom_of(part))]
        else:
            parts = re.split(r" +&&? +", right)
        atoms = [operand for part in parts if (operand := atom_of(part))]
        return atoms if len(atoms) == len(parts) else []

    def _place_registers(self) -> None:
        """Place each register inside the nested conditions that imply its own."""
        registers = self.module.registers
        clock = Counter(register.text[0].removesuffix(" begin") for register in registers).most_common(1)
        common: dict[Register, set[str]] = {
            register: set.intersection(*map(self.implied, register.conditions)) for register in registers
            if register.conditions and register.text[0].removesuffix(" begin") == clock[0][0]
        }  # fmt: skip
        popular = Counter(atom for atoms in common.values() for atom in atoms)

        def most_specific(atoms: Iterable[str]) -> str:
            """Return the atom that implies most others; of several, the one that fewest registers' conditions imply."""
            return max(atoms, key=lambda atom: (len(self.implied(atom)), -popular[atom], atom))

        def path_to(atom: str) -> Path:
            """Return the nested conditions around a register with this condition, from the outermost to `atom`."""
            outer = {candidate for candidate in self.implied(atom) if atom not in self.implied(candidate)}
            return (*path_to(most_specific(outer)), atom) if outer else (atom,)

        for register, atoms in common.items():
            if atoms:
                register.path = path_to(most_specific(atoms))

    def _paths_of_uses(self) -> dict[str, set[Path]]:
        """Return, by the name of a signal, the paths (nested conditions) at which registers and conditions use it."""
        used: defaultdict[str, set[Path]] = defaultdict(set)
        for name in self.module.fixed:
            used[name].add(())
        for register in self.module.registers:
            for name in names_in("\n".join(register.body if register.path else register.text) + " "):
                used[name].add(register.path)
            for name in names_in(register.reset + " "):
                used[name].add(())
            for depth, atom in enumerate(register.path):
                used[base_of(atom)].add(register.path[:depth])
        return used

    def _place_assigns(self) -> tuple[dict[int, set[Path]], list[Assign]]:
        """Return the place of each assignment, and an order of those that move in which each comes after its operands.

        Assignments that write parts of one name stay together. They are placed after all that read them; those in
        loops of names, which have no such order, and all in front of them stay outside.
        """
        used, assigns = self._paths_of_uses(), self.module.assigns
        together = _assign_groups(assigns)
        readers: defaultdict[str, set[int]] = defaultdict(set)
        members: defaultdict[int, list[Assign]] = defaultdict(list)
        for assign in assigns:
            members[together[id(assign)]].append(assign)
            for name in assign.reads:
                readers[name].add(together[id(assign)])
        writes = {number: {name for part in parts for name in part.writes} for number, parts in members.items()}
        waiting = {number: {r for name in names for r in readers[name]} for number, names in writes.items()}
        inputs: defaultdict[int, set[int]] = defaultdict(set)
        for number, after in waiting.items():
            for reader in after:
                inputs[reader].add(number)
        children: dict[int, set[Path]] = {}
        order: list[Assign] = []
        ready = [number for number, after in waiting.items() if not after]
        while ready:
            number = ready.pop()
            names = writes[number]
            paths = {path for name in names for path in used.get(name, ())}
            paths |= {path for name in names for reader in readers[name] for path in children[reader]}
            children[number] = _common_places(paths) if names <= self.module.wires.keys() else {()}
            order += reversed(members[number])
            for before in inputs[number]:
                waiting[before].discard(number)
                if not waiting[before]:
                    ready.append(before)
        return {id(assign): children.get(together[id(assign)], {()}) for assign in assigns}, order[::-1]


def _assign_groups(assigns: list[Assign]) -> dict[int, int]:
    """Number the assignments, with equal numbers for those that write parts of one name."""
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


def _common_places(paths: set[Path]) -> set[Path]:
    """Return the innermost paths whose variables are visible at all of `paths`: their longest common prefixes.

    There is one for each outermost condition among `paths`, at which logic is copied. If these are more than COPIES, or
    one of `paths` is outside all conditions, the only place is outside: (). Example: {(a, b), (a, c), (d,)} gives
    {(a,), (d,)}.
    """
    meeting: dict[str, Path] = {}
    for path in paths:
        if not path:
            return {()}
        other = meeting.get(path[0], path)
        same = next((n for n, (a, b) in enumerate(zip(path, other)) if a != b), min(len(path), len(other)))
        meeting[path[0]] = path[:same]
    return set(meeting.values()) if len(meeting) <= COPIES else {()}


def gate_registers(text: str) -> str:
    """Return Yosys' flat Verilog module `text` with its logic inside the conditions of the registers that use it."""
    module = Module(select_entries(text))
    gating = _Gating(module)
    assigns: defaultdict[Path, list[Assign]] = defaultdict(list)
    registers: defaultdict[Path, list[Register]] = defaultdict(list)
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

    def condition_lines(path: Path) -> Iterator[str]:
        """Yield the if statement of a path's innermost condition, with all logic and registers in it."""
        yield f"if ({condition_of(path[-1])}) begin"
        names = dict.fromkeys(name for assign in assigns[path] for name in sorted(assign.writes))
        parts = {name for assign in assigns[path] if "[" in assign.left for name in assign.writes}
        yield from (f"  {declare_variable(module.wires[name], verilog_name(name))}" for name in names)
        entries = (register.local for register in registers[path] if register.local)
        yield from (f"  {declare_variable(width, word_of(memory))}" for memory, width in entries)
        # A variable that is written part by part would be randomised first, which takes long.
        yield from (f"  {verilog_name(name)} = 0;" for name in names if name in parts)
        for assign in assigns[path]:
            yield f"  {assign.left} = {assign.right}"
        for register in registers[path]:
            yield from (f"  {line.strip()}" for line in register.body)
        for inner_line in inner[path]:
            yield from (f"  {line}" for line in condition_lines(inner_line))
        yield "end"

    def nested_paths(path: Path) -> Iterator[Path]:
        """Yield a path and all paths inside it."""
        yield path
        for line in inner[path]:
            yield from nested_paths(line)

    def task_lines(number: int, path: Path) -> Iterator[str]:
        """Yield the task of an outermost condition, and the always block that calls it and resets its registers."""
        places = list(nested_paths(path))
        blocks = [register for place in places for register in registers[place]]
        yield f"  task automatic gated{number};"
        yield from (f"    {line}" for line in condition_lines(path))
        yield "  endtask"
        yield f"{blocks[0].text[0].removesuffix(' begin')} begin"
        yield f"    gated{number};"
        yield from (f"    {register.reset}" for register in blocks if register.reset)
        yield "  end"

    return "\n".join(_module_lines(module, gating, moved, [task_lines(n, path) for n, path in enumerate(inner[()])]))


def _module_lines(module: Module, gating: _Gating, moved: set[str], groups: Iterable[Iterator[str]]) -> Iterator[str]:
    """Yield the module's lines, with gated statements in groups before its end."""
    for line in module.statements:
        if isinstance(line, Assign):
            if () in gating.paths.get(id(line), ()):
                yield f"  assign {line.left} = {line.right}"
        elif isinstance(line, Register):
            if not line.path:
                yield from line.text
        elif line == "endmodule":
            for group in groups:
                yield from group
            yield line
        elif not ((declaration := DECLARATION.fullmatch(line)) and (declaration[2] or declaration[3]) in moved):
            yield line
