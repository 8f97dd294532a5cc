"""Import: an ONNX file becomes a checked graph with static shapes.

`graph/importer.py` runs all of this. In the order in which a model passes:

validation            which models are refused as damaged, too deeply nested, with too many axes or elements, or with
                      operands of element types that their operator does not take, and with which message (an
                      attribute is refused here by its value; if ONNX does not know it, by the checker in
                      graph/importer.py; if no kernel computes it, by `Node.fail` of its builder in ops/; largest
                      file: graph/importer.py; more memory than this machine has: compiler/frontend.py; more than a
                      board's numpy: compiler/compile.py)
normalise             how models that onnxruntime accepts and the ONNX checker refuses become valid; which opset is the
                      newest known: newer ones are read like it
inlining              which operators become the operators of their definition, which nodes compute a Gradient, and
                      which branch of an If runs
shape_inference       which shapes and types onnx's inference gives, where its windows are wrong, and how long a range
                      between two open positions is
body_types            which types and shapes the values in bodies of If, Loop and Scan have
dimensions            which sizes of inputs are open, and which numbers given shapes imply for them
                      (graph/importer.py refuses inputs without a rank)
set_inputs            which constants replace inputs (`--set`), and which values fit an input
sample_independence   whether each sample of a batch is computed alone, by operators and their attributes
"""
