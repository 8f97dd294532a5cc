"""Import: an ONNX file becomes a checked graph with static shapes.

`graph/importer.py` runs all of this but the sizes; `graph/specialise.py` calls it for given sizes. In the order in
which a model passes:

validation            which models are refused as damaged, too deeply nested, or with too many axes or elements, and
                      with which message (largest file: graph/importer.py)
normalise             how models that onnxruntime accepts and the ONNX checker refuses become valid; which opset is the
                      newest known: newer ones are read like it
functions, gradient   which operators become the operators of their definition
shape_inference       which shapes and types onnx's inference gives, and where its windows are wrong
range_lengths         how long a range between two open positions is
branches              which branch of an If runs, and which types the bodies of operators have
dimensions            which sizes of inputs are open, and which numbers given shapes imply for them
                      (graph/importer.py refuses inputs without a rank)
sample_independence   whether each sample of a batch is computed alone
sample_rules          for which operators and attributes samples stay apart
limits                which models need more memory than this machine has, or more than a board's numpy
"""
