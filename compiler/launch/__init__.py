"""Layers to launches.

In the order in which layers pass the files:

blocks, attentions    which layers run as one and keep their intermediates on chip; chains: cycles of candidates
order                 in which order the layers of a launch run, so that layers which need different units overlap; the
                      timing model decides, for every Config
overlap               which layers may overlap at all (`is_for_vector`, `_waiting_guests`), and how their tiles mix
image                 which instructions and constants a Program has
memory_plan           where tensors lie in DRAM, and in the memory of the CPU
assemble, describe    the steps of the Program, and what users read of its layers
"""
