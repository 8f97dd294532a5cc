"""The ONNX graph in memory (onnx-ir): its import, and the passes that rewrite it.

In the order in which a model passes them:

importer             how a file becomes a graph, by the files of importing/; which open sizes become numbers, and which
                     a Program leaves open
external_data        which constants of large models stay in their files
importing/           which models are read, and which shapes and types their tensors have
pipeline             which passes run, and in which order
passes               how passes run, and which rules a graph must keep after each
onnxruntime_rules/   which rewrites onnxruntime makes before it computes quantised and float16 models
shapes               which shapes the operators' expressions give, and whether declared ones agree; windows of
                     convolutions and poolings, as rows and columns
qdq                  which scale and zero point QuantizeLinear and DequantizeLinear give a tensor
quantized/           which integer operators replace QDQ patterns
simplify/            what is computed at compile time, merged or removed
packed_projections   which columns of a product several readers take, each of which gets a product of its own; keys
                     and values that heads share
padded_heads         which heads of attention are padded to whole channel groups
rows                 which tensors consist of rows, such as tokens; operators on rows of several axes or samples, and
                     tables behind reshapes
row_products         which means of rows, and numbers that multiply or are added to rows, become products by ones
channel_moves        which operators that move channels of bytes become part of weights, or a Gather
transposed_values    where the accelerator transposes the values of attention
block_sums           which products by weights of few bits become integer sums of blocks
select/              which operators run on the accelerator, and as which layers; what a failed attempt to lower the
                     graph requires of the next one
levels               which 8-bit tensors have so few values that products can count bits
launches             the order of CPU operators and launches, and which layers share a launch

Used by all of them:

values               constants, shapes, subgraphs; attributes as the model has them (a negative `axis` stays negative:
                     `Node.axis` of ops/registry resolves it for the CPU, each function of select/ for layers);
                     replacement of nodes; unique names
operands             operands by their names; properties of operators by their OpSpec; operators that users define
                     in the tile language
cost                 multiply-accumulates of a graph, and estimated cycles of the CPU
errors               the error of a model that cannot be compiled
printer              a graph as text
"""
