"""Import: an ONNX file to a checked graph with static shapes, in the order in which a model passes the files.

external_data         where the constants of large models lie
validation            which models are refused, and with which message
normalise             how models that onnxruntime accepts and the ONNX checker refuses become valid
limits                which models need more memory than this machine has
functions, gradient   which calls become the operators of their definition
dimensions            which sizes of inputs are open, and which sizes given shapes imply
specialise            which open sizes become numbers, and which a Program leaves open
sample_independence, sample_rules    whether each sample of a batch is computed alone
shape_inference       which shapes and types onnx's inference gives, and where its windows are wrong
range_lengths         how long a range between two open positions is
branches              which branch of an If runs, and which types the bodies of operators have
importer              runs all of these
"""
