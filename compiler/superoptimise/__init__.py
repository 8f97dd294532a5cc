"""A superoptimiser of graphs: proved rules rewrite a model, and those are chosen that save cycles of the whole launch.

In the order in which a model passes the files:

optimise            from an ONNX model to one that computes the same bytes in fewer cycles: the stages below, in order
budget              parse how long a search may take (the default: driver/tune/optimise.py)
reading             ONNX nodes to operations of the algebra; byte_forms, float_forms and real_forms read each operator
graph               a model in the algebra
search              which rules are applied and where; state: the progress of a search
matching            where a rule fits, and the graph after it
neighbourhood       estimated saving of one step
price               cost of a whole model: predicted cycles, or measured time of CPU kernels
scales              scales of ONNX for the multipliers of a new product
writing             operations back to ONNX nodes, for each operator
compare_outputs     whether two models give the same bytes on random inputs
rounding            with fast-math: how far outputs may differ, and do
search_records      earlier results of searches, kept in the file of `celosia tune`
derivation          the steps as text and as metadata of the model; graph_difference: operators before and after

What a rule is, and why it holds:

sizes, terms, rule  symbolic sizes, terms over operators, and rules of two sides
rules/              rules written by hand
generation/         rules found by enumeration; generated_rules: the file that holds those that win
operators           shape of each operator's result, and its value in numpy; shape_demands: which operands it accepts
                    (a new operator: operators, shape_demands and meaning, or the files of its kind below)
meaning             an element of each operator's result as an expression, for proofs; elements: what such expressions
                    are made of
prover              proofs of rules for all sizes; proofs: the files of proofs, without which no rule is used
trial               tests of rules on random tensors
windows, floats, reals  operators on averages, floats and real numbers; window_meaning, float_meaning, real_meaning:
                    their elements
"""
