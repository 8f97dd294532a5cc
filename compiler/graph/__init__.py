"""The ONNX graph, in memory as onnx-ir: its import, and the passes that rewrite it.

In the order in which a model passes them:

importer, external, normalise, validation    which models are read; functions, gradient: which calls are expanded
inference, window_shapes, lengths            which shapes and types onnx's inference gets right
dimensions, specialise, samples              which open sizes become numbers, and whether samples are independent
pipeline                                     the list of all passes; passes: how they run; check: what is verified
  rules of onnxruntime that decide the bytes: branches, weights, double_pairs, bias_scales, narrow, float_weights,
      float16; propagation and bounds say where onnxruntime moves QuantizeLinear and DequantizeLinear
  shapes, fold, quantized (with qdq and commute), tables (with chain), identities, batchnorm, channels, transposed, cse,
      layout, dead; for some Configs transposed_values and block_sums; norms, sums, averages: results rounded correctly
select/                                      which operators run on the accelerator, and as which layers
launches                                     the order of CPU operators and launches
constraints                                  what a failed attempt to lower the graph leaves for the next one
values, operands, names, windows, cost       questions that passes ask: of values, of operands, MACs and windows
"""
