"""Simulators of the accelerator behind one Device protocol.

device        the Device protocol: what a Runtime may ask of any simulator or board; counters, events and errors
devices       the names of all devices, and which class a simulator's name opens
host          how the host checks the accelerator, and prepares, starts, ends and reads a run through the control
              registers (RTL simulator, boards)
functional/   what each instruction computes, and which entries and bytes it accesses; no cycles
timing/       how many cycles a launch is predicted to take; no data
rtl/          the hardware itself, compiled by Verilator
trace         how the events of a launch become a timeline for Perfetto (with layers: driver/pages/chrome_trace.py)
"""
