"""Parts that several units of the hardware use.

axi.py      AXI4 and AXI4-Lite ports; bursts and beats on the way to the read channel
layout.py   instructions as Amaranth layouts; the ports that every unit, scratchpad and event trace has
signals.py  kinds of registers
probes.py   names under which proofs and tests read signals inside a component
"""
