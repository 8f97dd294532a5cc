"""Layers to launches, in the order in which layers pass the files:

blocks                which layers run as one and keep their intermediates on chip, attention among them; in which order
                      chains of layers are tried, and where they are cut
order                 which layers of a launch become neighbours, so that layers which need different units overlap;
                      how many cycles consecutive layers take
overlap               which neighbours overlap at all (hosts and guests: `is_for_vector`, `follows`; average pools
                      are depthwise layers, see graph/select/reductions), and how their tiles mix (`TileInterleaver`)
image                 which instructions and constants a launch has: it lowers layers, emits tiles, encodes; when each
                      storage of activations is in use; at which addresses constants lie: in order of first use, equal
                      ones once (their bytes and alignment: tensorize/pack)
memory_plan           where activations lie in device memory, and tensors in the arena of the CPU (order of tries,
                      alignment)
assemble              which steps, kernels and tensors the Program has, and what reports know of each layer; which
                      words users read about it (remarks are another field: a `LayerAssignment.note` of graph/select
                      becomes `LayerInfo.note`)
"""
