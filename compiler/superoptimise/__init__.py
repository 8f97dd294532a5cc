"""A superoptimiser of graphs: rules that are proved, chosen by the cycles of the whole launch.

In the order in which a model passes the files:

optimise                     an ONNX model to one that computes the same bytes in fewer cycles
reading, forms, graph        which operations of the algebra a model's operators are
terms, operators, rule, rules/, sizes    what a rule is, and which are written by hand; stored: generated ones
elements, meaning, prover, proofs, trial which rules are proved, and a test of proofs in onnxruntime's arithmetic
matching, search, state      where rules fit, and which are taken
neighbourhood, price, kept               what a step saves, by cycles or by time
scales, writing              the model as ONNX again; derivation, changes: how it came to be
floats, reals (with their forms and meanings), rounding    fast-math: floats as real numbers, and the error
equal                        whether two models give the same bytes under an oracle
"""
