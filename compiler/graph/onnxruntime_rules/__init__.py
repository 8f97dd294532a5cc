"""Rewrites that onnxruntime makes before it computes a quantised or float16 model; they decide the bytes.

The passes of `pipeline.IMPORT_PASSES`, in their order:

block_quantised_products   which activations of MatMulNBits become bytes, block by block
double_pairs               which two QDQ pairs in a row become one
bias_scales                which biases get the scale of their products
narrow_integers            which integers of fewer than 8 bits become bytes
float_weights              which float weights and biases become integers: float16 biases here, float32 after `float16`
float16                    which float16 operators are computed in float32

All of them ask:

propagation                where QuantizeLinear and DequantizeLinear stand once onnxruntime has moved them
"""
