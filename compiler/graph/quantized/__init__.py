"""QDQ patterns to integer operators: one form for all quantised models.

integerise    which QDQ pattern becomes which integer operator; which Relu and Clip of floats move behind
              QuantizeLinear; it runs commute, and asks tables for functions of chains
commute       which operators QuantizeLinear and DequantizeLinear change places with; which maxima become poolings
tables        which functions of one 8-bit tensor become one table, of quantised operators or chains of float ones
              (single functions: every element-wise operator of ops/; bytes of a table: numerics/tables)
exact_products
              which products that onnxruntime computes in floats have the bytes of integers, as no sum of them rounds
between       which float tensors between quantised ones become bytes, where users ask for it (`rounding`)
written_norms which single operators are a normalisation, which is rounded once, where users ask for it (`rounding`)
row_polynomials
              what operators on rows compute, as polynomials of elements, mean and mean square
rounded       which sums, averages and normalisations are rounded correctly, where users ask for it (`rounding`)
"""
