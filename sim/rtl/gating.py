"""Gate the logic of flat Verilog for faster simulation: logic is evaluated only in cycles in which a register needs it.

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

Nothing else changes: registers get the same values in the same cycles. Statements in forms that are not known here stay
where they are. Conditions are nested: where `enable` is `valid & move`, logic that several such enables share stands in
`if (valid)`. Logic that up to COPIES groups of registers use is copied into each of them. Variables of a task become
local variables of a C++ function, which need no place in memory; those of an always block would be stored each time.

This reads the text that Yosys writes, by regular expressions, and not Yosys' cells in JSON. For `pynq` at ce51725 these
are 8,225 cells of 31 types in 13.7 MB, which cost Yosys 1.4 s more than 1.7 MB of Verilog; reading the Verilog and
moving statements takes 0.4 s. The readers of a cell would be as easy to find, but cells that move must become Verilog
again: expressions of all 31 types, and memory ports with their behaviour during a write. That would be a second writer
of Verilog, longer than this reader.
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
"""Largest number of groups of registers that each get their own copy of shared logic."""


class _Gating:
    """The conditions under which the value of each statement of a module is needed.

    drivers: the assignments of each signal. paths: by id of an assignment, the nested conditions it is moved into.
    order: the assignments, each after those that it reads.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.drivers: defaultdict[str, list[Assign]] = defaultdict(list)
        for assign in module.assigns:
            for name in assign.writes:
                self.drivers[name].append(assign)
        self._closures: dict[str, set[str]] = {}
        self._place_registers()
        self.paths, self.order = self._place_assigns()

    def implied_atoms(self, atom: str) -> set[str]:
        """Return `atom` and all atoms that are true whenever it is true."""
        if atom not in self._closures:
            self._closures[atom] = {atom}  # ends the recursion where definitions form a cycle
            self._closures[atom] |= {
                implied for operand in self._implied_by_definition(atom) for implied in self.implied_atoms(operand)
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
            value, _, otherwise = rest.rpartition(" : ")
            parts = [condition] if "?" not in value and ZERO.fullmatch(otherwise.strip()) else []
        elif atom != base:
            parts = []  # a bit of a wider signal
        elif conjunction := re.fullmatch(r"& \{ (.*) \}", right):
            return [operand for part in conjunction[1].split(", ") if (operand := atom_of(part))]
        else:
            parts = re.split(r" +&&? +", right)
        atoms = [operand for part in parts if (operand := atom_of(part))]
        return atoms if len(atoms) == len(parts) else []

    def _place_registers(self) -> None:
        """Set the path of each register: the nested conditions to put it into, all implied by its own conditions.

        Registers with conditions on the most common clock are moved; all others stay outside.
        """
        registers = self.module.registers
        clock = Counter(register.text[0].removesuffix(" begin") for register in registers).most_common(1)
        implied_of: dict[Register, set[str]] = {
            register: set.intersection(*map(self.implied_atoms, register.conditions)) for register in registers
            if register.conditions and register.text[0].removesuffix(" begin") == clock[0][0]
        }  # fmt: skip
        use_counts = Counter(atom for atoms in implied_of.values() for atom in atoms)

        def most_specific(atoms: Iterable[str]) -> str:
            """Return the atom that implies the most others; among equals, the one implied by the fewest registers."""
            return max(atoms, key=lambda atom: (len(self.implied_atoms(atom)), -use_counts[atom], atom))

        def path_to(atom: str) -> Path:
            """Return the nested conditions around a register with the condition `atom`, which is the innermost one."""
            outer = {candidate for candidate in self.implied_atoms(atom) if atom not in self.implied_atoms(candidate)}
            return (*path_to(most_specific(outer)), atom) if outer else (atom,)

        for register, atoms in implied_of.items():
            if atoms:
                register.path = path_to(most_specific(atoms))

    def _paths_of_uses(self) -> dict[str, set[Path]]:
        """Return, by the name of a signal, the paths (nested conditions) at which registers and conditions use it."""
        paths: defaultdict[str, set[Path]] = defaultdict(set)
        for name in self.module.fixed:
            paths[name].add(())
        for register in self.module.registers:
            for name in names_in("\n".join(register.body if register.path else register.text) + " "):
                paths[name].add(register.path)
            for name in names_in(register.reset + " "):
                paths[name].add(())
            for depth, atom in enumerate(register.path):
                paths[base_of(atom)].add(register.path[:depth])
        return paths

    def _place_assigns(self) -> tuple[dict[int, set[Path]], list[Assign]]:
        """Return the paths of each assignment, by its id, and all assignments, operands before readers.

        Assignments that write parts of one name form a group, which moves as one. A group is visited when the paths of
        all its readers are known. Groups in combinational loops stay outside, and so do those whose results reach one.
        """
        use_paths, assigns = self._paths_of_uses(), self.module.assigns
        group_of = _assign_groups(assigns)
        readers: defaultdict[str, set[int]] = defaultdict(set)
        members: defaultdict[int, list[Assign]] = defaultdict(list)
        for assign in assigns:
            members[group_of[id(assign)]].append(assign)
            for name in assign.reads:
                readers[name].add(group_of[id(assign)])
        writes = {number: {name for part in parts for name in part.writes} for number, parts in members.items()}
        waiting = {number: {r for name in names for r in readers[name]} for number, names in writes.items()}
        inputs: defaultdict[int, set[int]] = defaultdict(set)
        for number, after in waiting.items():
            for reader in after:
                inputs[reader].add(number)
        group_paths: dict[int, set[Path]] = {}
        order: list[Assign] = []
        ready = [number for number, after in waiting.items() if not after]
        while ready:
            number = ready.pop()
            names = writes[number]
            paths = {path for name in names for path in use_paths.get(name, ())}
            paths |= {path for name in names for reader in readers[name] for path in group_paths[reader]}
            group_paths[number] = _common_places(paths) if names <= self.module.wires.keys() else {()}
            order += reversed(members[number])
            for before in inputs[number]:
                waiting[before].discard(number)
                if not waiting[before]:
                    ready.append(before)
        return {id(assign): group_paths.get(group_of[id(assign)], {()}) for assign in assigns}, order[::-1]


def _assign_groups(assigns: list[Assign]) -> dict[int, int]:
    """Return a group number for each assignment, by its id: assignments that write parts of one name share one."""
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
    prefixes: dict[str, Path] = {}  # longest common prefix, by outermost condition
    for path in paths:
        if not path:
            return {()}
        prefix = prefixes.get(path[0], path)
        length = next((n for n, (a, b) in enumerate(zip(path, prefix)) if a != b), min(len(path), len(prefix)))
        prefixes[path[0]] = path[:length]
    return set(prefixes.values()) if len(prefixes) <= COPIES else {()}


def gate_registers(text: str) -> str:
    """Return Yosys' flat Verilog module `text` with its logic inside the conditions of the registers that use it."""
    module = Module(select_entries(text))
    gating = _Gating(module)
    assigns: defaultdict[Path, list[Assign]] = defaultdict(list)
    registers: defaultdict[Path, list[Register]] = defaultdict(list)
    inner: defaultdict[Path, dict[Path, None]] = defaultdict(dict)  # the paths one level inside each path, in order
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
        for inner_path in inner[path]:
            yield from (f"  {line}" for line in condition_lines(inner_path))
        yield "end"

    def nested_paths(path: Path) -> Iterator[Path]:
        """Yield a path and all paths inside it."""
        yield path
        for inner_path in inner[path]:
            yield from nested_paths(inner_path)

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
    """Yield the lines of the module, without the statements and declarations that have moved into `groups`.

    moved: names that are local variables of the groups now. groups: lines of each task, put before the module's end.
    """
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
