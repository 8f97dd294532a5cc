"""Rewrites that onnxruntime makes before it computes a quantised or float16 model; they decide the bytes.

The order of the passes is that of `pipeline.IMPORT_PASSES`.

low_precision        which activations of MatMulNBits become bytes, block by block; which integers of fewer than 8 bits
                     become bytes
weights_and_biases   which float weights and biases become integers, and which biases get the scale of their products
float16              which float16 operators are computed in float32
propagation          where QuantizeLinear and DequantizeLinear stand once onnxruntime has moved them, which the others
                     ask; which two QDQ pairs in a row become one
"""
