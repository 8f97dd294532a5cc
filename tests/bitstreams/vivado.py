"""Model the part of Vivado that build.tcl uses: commands that check their arguments, and the block design.

Names of IPs, pins, parameters and options are those of the product guides PG082 (Zynq), PG201 (UltraScale+), PG164
(reset), PG065 (clocks), PG247 (SmartConnect) and of UG835 (Tcl commands). Anything unknown here is an error, as it is
in Vivado.
"""

from __future__ import annotations

import re
import tkinter
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

IPS = {
    "processing_system7": {
        "version": "5.5",
        "pins": {
            "FCLK_CLK0": "O", "FCLK_RESET0_N": "O", "M_AXI_GP0_ACLK": "I", "S_AXI_HP0_ACLK": "I", "S_AXI_HP1_ACLK": "I",
            "IRQ_F2P": "I",
        },
        "interfaces": {
            "M_AXI_GP0": "master", "S_AXI_HP0": "slave", "S_AXI_HP1": "slave", "DDR": "master", "FIXED_IO": "master",
        },
        "needs": {
            "M_AXI_GP0": "PCW_USE_M_AXI_GP0", "M_AXI_GP0_ACLK": "PCW_USE_M_AXI_GP0", "S_AXI_HP0": "PCW_USE_S_AXI_HP0",
            "S_AXI_HP0_ACLK": "PCW_USE_S_AXI_HP0", "S_AXI_HP1": "PCW_USE_S_AXI_HP1",
            "S_AXI_HP1_ACLK": "PCW_USE_S_AXI_HP1", "IRQ_F2P": "PCW_IRQ_F2P_INTR", "FCLK_CLK0": "PCW_EN_CLK0_PORT",
            "FCLK_RESET0_N": "PCW_EN_RST0_PORT",
        },
        "parameters": {
            "PCW_EN_CLK0_PORT": r"[01]", "PCW_EN_RST0_PORT": r"[01]", "PCW_FPGA0_PERIPHERAL_FREQMHZ": r"\d+",
            "PCW_USE_M_AXI_GP0": r"[01]", "PCW_USE_S_AXI_HP0": r"[01]", "PCW_S_AXI_HP0_DATA_WIDTH": r"64",
            "PCW_USE_S_AXI_HP1": r"[01]", "PCW_S_AXI_HP1_DATA_WIDTH": r"64",
            "PCW_USE_FABRIC_INTERRUPT": r"[01]", "PCW_IRQ_F2P_INTR": r"[01]",
        },
        "address_space": "Data",
    },
    "zynq_ultra_ps_e": {
        "version": "3.5",
        "pins": {
            "pl_clk0": "O", "pl_resetn0": "O", "maxihpm0_fpd_aclk": "I", "saxihp0_fpd_aclk": "I",
            "saxihp1_fpd_aclk": "I", "pl_ps_irq0": "I",
        },
        "interfaces": {"M_AXI_HPM0_FPD": "master", "S_AXI_HP0_FPD": "slave", "S_AXI_HP1_FPD": "slave"},
        "needs": {
            "M_AXI_HPM0_FPD": "PSU__USE__M_AXI_GP0", "maxihpm0_fpd_aclk": "PSU__USE__M_AXI_GP0",
            "S_AXI_HP0_FPD": "PSU__USE__S_AXI_GP2", "saxihp0_fpd_aclk": "PSU__USE__S_AXI_GP2",
            "S_AXI_HP1_FPD": "PSU__USE__S_AXI_GP3", "saxihp1_fpd_aclk": "PSU__USE__S_AXI_GP3",
            "pl_ps_irq0": "PSU__USE__IRQ0", "pl_clk0": "PSU__FPGA_PL0_ENABLE",
        },
        "parameters": {
            "PSU__FPGA_PL0_ENABLE": r"[01]", "PSU__CRL_APB__PL0_REF_CTRL__FREQMHZ": r"\d+",
            "PSU__USE__M_AXI_GP0": r"[01]", "PSU__USE__M_AXI_GP1": r"[01]", "PSU__USE__M_AXI_GP2": r"[01]",
            "PSU__USE__S_AXI_GP2": r"[01]", "PSU__SAXIGP2__DATA_WIDTH": r"32|64|128", "PSU__USE__IRQ0": r"[01]",
            "PSU__USE__S_AXI_GP3": r"[01]", "PSU__SAXIGP3__DATA_WIDTH": r"32|64|128",
        },
        "address_space": "Data",
    },
    "proc_sys_reset": {
        "version": "5.0",
        "pins": {
            "slowest_sync_clk": "I", "ext_reset_in": "I", "dcm_locked": "I", "peripheral_aresetn": "O",
            "peripheral_reset": "O",
        },
        "interfaces": {}, "needs": {}, "parameters": {}, "open": {"dcm_locked"},
    },
    "clk_wiz": {
        "version": "6.0",
        "pins": {"clk_in1": "I", "resetn": "I", "clk_out1": "O", "clk_out2": "O", "locked": "O"},
        "interfaces": {},
        "needs": {"resetn": "USE_RESET", "clk_out2": "CLKOUT2_USED", "locked": "USE_LOCKED"},
        "parameters": {
            "PRIM_IN_FREQ": r"\d+", "PRIM_SOURCE": "No_buffer|Global_buffer", "USE_RESET": "true|false",
            "RESET_TYPE": "ACTIVE_LOW|ACTIVE_HIGH", "USE_LOCKED": "true|false", "CLKOUT2_USED": "true|false",
            "CLKOUT1_REQUESTED_OUT_FREQ": r"\d+", "CLKOUT2_REQUESTED_OUT_FREQ": r"\d+",
            "OVERRIDE_MMCM": "true|false", "MMCM_DIVCLK_DIVIDE": r"\d+", "MMCM_CLKFBOUT_MULT_F": r"\d+",
            "MMCM_CLKOUT0_DIVIDE_F": r"\d+", "MMCM_CLKOUT1_DIVIDE": r"\d+",
        },
    },
    "smartconnect": {
        "version": "1.0",
        "pins": {"aclk": "I", "aresetn": "I"},
        "interfaces": {"S00_AXI": "slave", "M00_AXI": "master", "M01_AXI": "master"}, "needs": {},
        "parameters": {"NUM_SI": r"\d+", "NUM_MI": r"\d+"},
    },
    "axi_intc": {
        "version": "4.1",
        "pins": {"s_axi_aclk": "I", "s_axi_aresetn": "I", "intr": "I", "irq": "O"},
        "interfaces": {"s_axi": "slave"}, "needs": {}, "parameters": {"C_IRQ_CONNECTION": r"[01]"},
    },
}  # fmt: skip
PROTOCOLS = {"processing_system7": "AXI3", "zynq_ultra_ps_e": "AXI4", "axi_intc": "AXI4LITE"}
RULES = {
    "xilinx.com:bd_rule:processing_system7": {"make_external", "apply_board_preset", "Master", "Slave"},
    "xilinx.com:bd_rule:zynq_ultra_ps_e": {"apply_board_preset"},
}


class VivadoError(Exception):
    """An error at which Vivado would have stopped."""


class Vivado:
    """Run Tcl with the commands of Vivado.

    parts: installed devices. boards: board files. slack, hold: of the implementation. missing: "bit" or "hwh", a file
    that it does not write. failing: a run that ends with an error.

    cells: IP or "module" of each cell. nets: sets of connected pins. buses: pairs of connected interfaces. ports:
    lights.
    """

    def __init__(
        self, parts: set[str], boards: tuple[str, ...] = (), slack: str = "0.213", hold: str = "0.01",
        ips: frozenset[str] = frozenset(IPS), missing: str = "", failing: str = "",
    ) -> None:  # fmt: skip
        self.parts, self.boards, self.slack, self.hold, self.ips = parts, boards, slack, hold, ips
        self.missing, self.failing = missing, failing
        self.design = ""
        self.cells: dict[str, str] = {}
        self.parameters: dict[str, dict[str, str]] = {}
        self.modules: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
        self.protocols: dict[tuple[str, str], str] = {}
        """The protocol of each (module, interface)."""
        self.nets: list[set[str]] = []
        self.buses: list[tuple[str, str]] = []
        self.ports: list[str] = []
        self.segments: dict[str, str] = {}
        self.files: list[Path] = []
        self.folder = Path()
        self.properties: dict[tuple[str, str], str] = {}
        self.validated = False
        self.runs: dict[str, str] = {}
        """Status of each run."""
        self.tcl = tkinter.Tcl()
        for name in dir(self):
            if name.startswith("tcl_"):
                self.tcl.createcommand(name.removeprefix("tcl_"), self._command(getattr(self, name)))

    def source(self, path: Path) -> None:
        """Run a script. Raise VivadoError with Tcl's message if it stops."""
        try:
            self.tcl.call("source", str(path))
        except tkinter.TclError as error:
            raise VivadoError(str(error)) from None

    def _command(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                result = method(*(str(a) if not isinstance(a, tuple) else a for a in arguments))
            except Exception as error:
                message = f"{method.__name__.removeprefix('tcl_')}: {error}"
                self.tcl.setvar("vivado_error", message)
                return self.tcl.eval("error $vivado_error")
            return "" if result is None else result

        return call

    def _options(
        self, arguments: tuple[str, ...], values: str = "", flags: str = ""
    ) -> tuple[dict[str, str], list[str]]:
        """Return the options with their values, and the other arguments."""
        options, rest, waiting = {}, [], list(arguments)
        while waiting:
            word = waiting.pop(0)
            if word in values.split():
                if not waiting:
                    raise VivadoError(f"{word} needs a value")
                options[word] = waiting.pop(0)
            elif word in flags.split():
                options[word] = "1"
            elif isinstance(word, str) and re.match(r"-[a-z]", word):
                raise VivadoError(f"unknown option {word}")
            else:
                rest.append(word)
        return options, rest

    def _list(self, words: Any) -> list[str]:
        return list(self.tcl.splitlist(words))

    # Project

    def tcl_create_project(self, *arguments: str) -> None:
        options, rest = self._options(arguments, "-part", "-force")
        if len(rest) != 2 or options.get("-part") not in self.parts:
            raise VivadoError(f"project {rest} for part {options.get('-part')}, which is not installed")
        self.folder = Path(rest[1])
        self.folder.mkdir(exist_ok=True)

    def tcl_add_files(self, *arguments: str) -> None:
        options, rest = self._options(arguments, "-fileset", "-norecurse")
        if options.get("-fileset", "constrs_1") != "constrs_1":
            raise VivadoError(f"no fileset {options['-fileset']}")
        for name in (name for words in rest for name in self._list(words)):
            if not Path(name).exists():
                raise VivadoError(f"no file {name}")
            self.files.append(Path(name))
            if name.endswith(".v"):
                self.modules |= _modules(Path(name).read_text())
                self.protocols |= _protocols(Path(name).read_text())

    def tcl_update_compile_order(self, *arguments: str) -> None:
        self._options(arguments, "-fileset")

    def tcl_current_project(self) -> str:
        return "project"

    def tcl_current_fileset(self) -> str:
        return "sources_1"

    def tcl_version(self, *arguments: str) -> str:
        self._options(arguments, "", "-short")
        return "2024.1"

    def tcl_get_board_parts(self, *arguments: str) -> tuple[str, ...]:
        _, rest = self._options(arguments, "", "-quiet")
        return tuple(name for name in self.boards if fnmatchcase(name, rest[0]))

    def tcl_get_ipdefs(self, *arguments: str) -> tuple[str, ...]:
        options, _ = self._options(arguments, "-filter", "-quiet")
        matched = re.fullmatch(r"VLNV =~ (\S+)", options["-filter"])
        if matched is None:
            raise VivadoError(f"filter {options['-filter']}")
        names = [f"xilinx.com:ip:{ip}:{v}" for ip in self.ips for v in ("1.0", IPS[ip]["version"])]
        return tuple(name for name in names if fnmatchcase(name, matched[1]))

    def tcl_get_files(self, *arguments: str) -> str:
        return arguments[0]

    # Block design

    def tcl_create_bd_design(self, name: str) -> None:
        self.design = name

    def tcl_create_bd_cell(self, *arguments: str) -> str:
        options, rest = self._options(arguments, "-type -vlnv -reference")
        (name,) = rest
        if name in self.cells:
            raise VivadoError(f"there is a cell {name} already")
        if options["-type"] == "module":
            if options["-reference"] not in self.modules:
                raise VivadoError(f"no module {options['-reference']} in the files")
            self.cells[name] = f"module {options['-reference']}"
        else:
            ip = options["-vlnv"].split(":")[2]
            if options["-vlnv"] != f"xilinx.com:ip:{ip}:{IPS[ip]['version']}":
                raise VivadoError(f"{options['-vlnv']} is not the newest")
            self.cells[name] = ip
        self.parameters[name] = {}
        return f"/{name}"

    def tcl_set_property(self, *arguments: Any) -> None:
        options, rest = self._options(arguments, "-dict")
        if "-dict" in options:
            words = self._list(options["-dict"])
            pairs, target = dict(zip(words[::2], words[1::2])), rest[0]
        else:
            name, value, target = rest
            pairs = {name: value}
        for name, value in pairs.items():
            self._set(target if isinstance(target, str) else target[0], name, value)

    def _set(self, target: str, name: str, value: str) -> None:
        cell = target.removeprefix("/")
        if cell in self.cells:
            known = IPS[self.cells[cell]]["parameters"]
            parameter = name.removeprefix("CONFIG.")
            if parameter not in known or not re.fullmatch(known[parameter], value):
                raise VivadoError(f"{self.cells[cell]} has no parameter {name} with value {value}")
            self.parameters[cell][parameter] = value
        elif target in self.segments:
            if name not in ("offset", "range"):
                raise VivadoError(f"property {name} of {target}")
            self.segments[target] += f" {name}={value}"
        elif name == "board_part" and self.design:
            raise VivadoError(f"design {self.design} is locked: it is for another part than the board's")
        elif (target, name) in (("project", "board_part"), ("sources_1", "top")):
            self.properties[target, name] = value
        else:
            raise VivadoError(f"nothing called {target} has a property {name}")

    def tcl_get_property(self, name: str, target: str) -> str:
        if target not in self.runs:
            raise VivadoError(f"{target} has no {name} yet")
        values = {
            "PROGRESS": "100%" if "Complete" in self.runs[target] else "42%", "STATUS": self.runs[target],
            "STATS.WNS": self.slack, "STATS.WHS": self.hold, "DIRECTORY": str(self.folder / "celosia.runs" / target),
        }  # fmt: skip
        return values[name]

    def tcl_apply_bd_automation(self, *arguments: str) -> None:
        options, rest = self._options(arguments, "-rule -config")
        words = self._list(options["-config"])
        if set(words[::2]) != RULES[options["-rule"]] or rest[0].removeprefix("/") not in self.cells:
            raise VivadoError(f"automation {options} of {rest}")
        self.automated = dict(zip(words[::2], words[1::2]))

    def tcl_get_bd_cells(self, name: str) -> str:
        if name not in self.cells:
            raise VivadoError(f"no cell {name}")
        return f"/{name}"

    def _look(self, path: str, which: int) -> str:
        """Return the direction of a pin (which = 0) or an interface (which = 1)."""
        cell, _, pin = path.partition("/")
        kind = self.cells.get(cell, "")
        if kind.startswith("module "):
            direction = self.modules[kind.removeprefix("module ")][which].get(pin)
        elif kind:
            direction = IPS[kind][("pins", "interfaces")[which]].get(pin)
            switch = IPS[kind]["needs"].get(pin)
            if switch and self.parameters[cell].get(switch) not in ("1", "true"):
                raise VivadoError(f"{path} is switched off by {switch}")
            if pin not in self._interfaces(cell) and which:
                direction = None
        else:
            direction = None
        if direction is None:
            raise VivadoError(f"no {('pin', 'interface')[which]} {path}")
        return str(direction)

    def _interfaces(self, cell: str) -> set[str]:
        """Return the interfaces that an IP has with its parameters."""
        masters = int(self.parameters[cell].get("NUM_MI", "1"))
        return {name for name in IPS[self.cells[cell]]["interfaces"] if name != f"M{masters:02}_AXI"}

    def tcl_get_bd_pins(self, path: str) -> str:
        self._look(path, 0)
        return path

    def tcl_get_bd_intf_pins(self, path: str) -> str:
        self._look(path, 1)
        return path

    def tcl_create_bd_port(self, *arguments: str) -> str:
        options, rest = self._options(arguments, "-dir")
        if options["-dir"] not in ("I", "O"):
            raise VivadoError(f"direction {options['-dir']}")
        self.ports += rest
        return rest[0]

    def tcl_get_bd_ports(self, name: str) -> str:
        if name not in self.ports:
            raise VivadoError(f"no port {name}")
        return f"port {name}"

    def tcl_connect_bd_net(self, *pins: str) -> None:
        names = {pin if isinstance(pin, str) else pin[0] for pin in pins}
        drivers = [p for p in names if not p.startswith("port ") and self._look(p, 0) == "O"]
        if len(names) < 2 or len(drivers) != 1:
            raise VivadoError(f"net {sorted(names)} has {len(drivers)} drivers")
        for name in names - set(drivers):
            if any(name in net for net in self.nets):
                raise VivadoError(f"{name} is driven twice")
        self.nets.append(names)

    def tcl_connect_bd_intf_net(self, one: str, two: str) -> None:
        if {self._look(one, 1), self._look(two, 1)} != {"master", "slave"}:
            raise VivadoError(f"{one} and {two} do not fit")
        if any(pin in pair for pin in (one, two) for pair in self.buses):
            raise VivadoError(f"{one} or {two} is connected twice")
        if len(kinds := {self._protocol(one), self._protocol(two)} - {""}) > 1:
            raise VivadoError(f"property PROTOCOL of {one} and {two} does not match: {' and '.join(sorted(kinds))}")
        self.buses.append((one, two))

    def _protocol(self, path: str) -> str:
        """Return the protocol of an interface, or "" if it is unknown or, as of an interconnect, arbitrary."""
        cell, _, pin = path.partition("/")
        kind = self.cells[cell]
        return self.protocols.get((kind.removeprefix("module "), pin), PROTOCOLS.get(kind, ""))

    def tcl_assign_bd_address(self, *arguments: str) -> None:
        self._options(arguments)
        reach = dict(self.buses) | {b: a for a, b in self.buses}
        for cell, kind in self.cells.items():
            if kind not in ("processing_system7", "zynq_ultra_ps_e"):
                continue
            for name, direction in IPS[kind]["interfaces"].items():
                if direction == "master" and f"{cell}/{name}" in reach:
                    bridge = reach[f"{cell}/{name}"].split("/")[0]
                    for master in self._interfaces(bridge) - {"S00_AXI"}:
                        end = reach[f"{bridge}/{master}"].split("/")[0]
                        self.segments[f"{cell}/{IPS[kind]['address_space']}/SEG_{end}_reg0"] = ""

    def tcl_get_bd_addr_segs(self, pattern: str) -> str:
        names = [name for name in self.segments if fnmatchcase(name, pattern)]
        if len(names) != 1:
            raise VivadoError(f"{len(names)} address segments are like {pattern}")
        return names[0]

    def tcl_validate_bd_design(self) -> None:
        """Check that everything required is connected, and that clock managers are set up right."""
        joined = set().union(*self.nets)
        for cell, kind in self.cells.items():
            module = self.modules.get(kind.removeprefix("module "))
            pins = module[0] if module else IPS[kind]["pins"]
            for pin, direction in pins.items():
                switch = None if module else IPS[kind]["needs"].get(pin)
                is_enabled = switch is None or self.parameters[cell].get(switch) in ("1", "true")
                optional = not module and pin in IPS[kind].get("open", ())
                if direction == "I" and is_enabled and not optional and f"{cell}/{pin}" not in joined:
                    raise VivadoError(f"{cell}/{pin} is not connected")
            interfaces = module[1] if module else self._interfaces(cell) if kind in ("smartconnect", "axi_intc") else {}
            for name in interfaces:
                if not any(f"{cell}/{name}" in pair for pair in self.buses):
                    raise VivadoError(f"{cell}/{name} is not connected")
            if kind == "clk_wiz":
                self._check_clocks({name: value for name, value in self.parameters[cell].items() if value.isdigit()})
        self.validated = True

    def _check_clocks(self, parameters: dict[str, str]) -> None:
        """Check that the oscillator is in its range (DS187, DS925), and that outputs have the requested frequencies."""
        number = {name.removeprefix("MMCM_"): int(value) for name, value in parameters.items()}
        low, high = (600, 1200) if "processing_system7" in self.cells.values() else (800, 1600)
        oscillator = number["PRIM_IN_FREQ"] * number["CLKFBOUT_MULT_F"] / number["DIVCLK_DIVIDE"]
        if not low <= oscillator <= high or not 2 <= number["CLKFBOUT_MULT_F"] <= 64:
            raise VivadoError(f"the MMCM's oscillator would have {oscillator:g} MHz, not {low} to {high}")
        for output, divisor in (("CLKOUT1", "CLKOUT0_DIVIDE_F"), ("CLKOUT2", "CLKOUT1_DIVIDE")):
            if oscillator / number[divisor] != number[f"{output}_REQUESTED_OUT_FREQ"]:
                raise VivadoError(f"{output} would have {oscillator / number[divisor]:g} MHz")

    def tcl_save_bd_design(self) -> None:
        if not self.validated:
            raise VivadoError("saved before it was validated")

    def tcl_make_wrapper(self, *arguments: str) -> str:
        options, _ = self._options(arguments, "-files", "-top")
        if options["-files"] != f"{self.design}.bd":
            raise VivadoError(f"no design {options['-files']}")
        path = self.folder / f"{self.design}_wrapper.v"
        path.write_text(f"module {self.design}_wrapper(); endmodule\n")
        return str(path)

    # Runs

    def tcl_launch_runs(self, *arguments: str) -> None:
        options, (name,) = self._options(arguments, "-to_step -jobs")
        if not options["-jobs"].isdigit() or options.get("-to_step", "write_bitstream") != "write_bitstream":
            raise VivadoError(f"{options} {name}")
        if not self.properties.get(("sources_1", "top"), "").endswith("_wrapper"):
            raise VivadoError("the top is not the wrapper of the design")
        self.runs[f"{self.design}_celosia_0_{name}" if name == "synth_1" else name] = "synth_design Complete!"
        if self.failing in self.runs:
            self.runs[self.failing] = "synth_design ERROR"
            self.runs[name] = "Scripts Generated"
            return
        self.runs[name] = f"{'synth_design' if name == 'synth_1' else 'write_bitstream'} Complete!"
        if name == "impl_1":
            self._implement()

    def _implement(self) -> None:
        if "Complete" not in self.runs.get("synth_1", ""):
            raise VivadoError("impl_1 before synth_1 was complete")
        run = self.folder / "celosia.runs" / "impl_1"
        handoff = self.folder / "celosia.gen" / "sources_1" / "bd" / self.design / "hw_handoff"
        for folder in (run, handoff):
            folder.mkdir(parents=True, exist_ok=True)
        if self.missing != "bit":
            (run / f"{self.design}_wrapper.bit").write_bytes(b"a bitstream")
        if self.missing != "hwh":
            (handoff / f"{self.design}.hwh").write_text("<handoff/>")

    def tcl_wait_on_run(self, name: str) -> None:
        self.tcl_get_runs(name)
        if "Complete" not in self.runs[name]:
            raise VivadoError(f"Run '{name}' failed")  # as newer versions do

    def tcl_get_runs(self, *arguments: str) -> tuple[str, ...]:
        options, rest = self._options(arguments, "-filter", "-quiet")
        if not options and rest[0] not in self.runs:
            raise VivadoError(f"no run {rest[0]}")
        matched = re.fullmatch(r'STATUS =~ "(\S+)"', options.get("-filter", 'STATUS =~ "*"'))
        if matched is None:
            raise VivadoError(f"filter {options['-filter']}")
        return tuple(
            n for n, status in self.runs.items() if fnmatchcase(status, matched[1]) and n in (rest or self.runs)
        )


PORT = re.compile(
    r'\(\* X_INTERFACE_INFO = "xilinx\.com:(\w+):(\w+):1\.0 (\w+) (\w+)"[^*]*\*\)'
    r"\s*(input|output) +wire (?:\[\d+:0\] )?(\w+)"
)


def _protocols(text: str) -> dict[tuple[str, str], str]:
    interfaces = re.findall(r'aximm:1\.0 (\w+) \w+", X_INTERFACE_PARAMETER = "PROTOCOL (\w+)', text)
    return {("celosia", bus): kind for bus, kind in interfaces}


def _modules(text: str) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """Return each module as (pins, bus interfaces), as a block design shows it; attributes mark the buses."""
    result = {}
    for name, ports in re.findall(r"^module (\w+) ?\((.*?)\);", text, re.S | re.M):
        interfaces: dict[str, str] = {}
        bus_ports: dict[str, str] = {}
        for kind, interface_type, bus, role, direction, port in PORT.findall(ports):
            if (kind, interface_type) == ("interface", "aximm"):
                bus_ports[port] = bus
                if role == "ARVALID":
                    interfaces[bus] = "master" if direction == "output" else "slave"
        declared = re.findall(r"(input|output) +wire (?:\[\d+:0\] )?(\w+)", ports)
        pins = {port: "I" if direction == "input" else "O" for direction, port in declared if port not in bus_ports}
        result[name] = pins, interfaces
    return result
