"""The ONNX graph, in memory as onnx-ir: its import, and the passes that rewrite it.

In the order in which a model passes them:

importing/           which models are read, and which shapes and types their tensors have
pipeline             the list of all passes; passes: how they run; check: what is verified after each
onnxruntime_rules/   what onnxruntime does to quantised and float16 models before it computes them
shapes               which shapes the operators' expressions give
quantized/           which integer operators replace QDQ patterns
simplify/            what is computed at compile time, merged or removed
transposed_values, block_sums    what some Configs need in another form
select/              which operators run on the accelerator, and as which layers
launches             the order of CPU operators and launches
constraints          what a failed attempt to lower the graph leaves for the next one
values, operands, names, windows, cost, levels    questions that passes ask of values, operands, MACs and windows
custom               operators of a user's own
debug_outputs, printer    what users see of a graph
"""
