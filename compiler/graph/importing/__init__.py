"""Import: an ONNX file becomes a checked graph with static shapes.

`importer` runs all of this but the sizes; `specialise` calls it for given sizes. In the order in which a model passes:

external_data         which constants of large models stay in their files
validation            which models are refused as damaged, and with which message
normalise             how models that onnxruntime accepts and the ONNX checker refuses become valid
functions, gradient   which operators become the operators of their definition
shape_inference       which shapes and types onnx's inference gives, and where its windows are wrong
range_lengths         how long a range between two open positions is
importer              how a file becomes a graph: reads it, and runs the files above in order
branches              which branch of an If runs, and which types the bodies of operators have
dimensions            which sizes of inputs are open, and which numbers given shapes imply for them
specialise            which open sizes become numbers, and which a Program leaves open
sample_independence   whether each sample of a batch is computed alone
sample_rules          for which operators and attributes samples stay apart
limits                which models need more memory than this machine has, or more than a board's numpy
"""
