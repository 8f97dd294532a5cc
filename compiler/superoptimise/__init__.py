"""A superoptimiser of graphs: proved rules rewrite a model, and those are chosen that save cycles of the whole launch.

In the order in which a model passes the files:

optimise            from an ONNX model to one that computes the same bytes in fewer cycles: the stages below, in order
onnx_access         what operators ask of the reader and the writer
reading             ONNX nodes to operations of the algebra, by the readers that stand beside each operator
graph               a model in the algebra; the scales of ONNX for the multipliers of a new product
search              which rules are applied and where; progress, records and budget of a search
matching            where a rule fits, and the graph after it
price               cost of a whole model, by cycles or measured time, and the estimated saving of one step
writing             operations back to ONNX nodes, by the writer of each operator
compare_outputs     whether two models give the same bytes on random inputs, or how far fast-math's outputs differ
derivation          the steps as text and as metadata of the model, and the operators before and after

What a rule is, and why it holds:

rule                symbolic sizes, terms over operators, and rules of two sides
rules/              rules written by hand
generator           rules found by enumeration, and which of them are kept
vocabularies        which tensors and operators the generator enumerates
operators/          what each operator is: shape, demands, result in numpy, element for proofs, ONNX form
prover              proofs of rules for all sizes
proofs              the files of proofs, without which no rule is used; generated.json, the generated rules that win
trial               tests of rules on random tensors
"""
