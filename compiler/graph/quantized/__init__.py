"""QDQ patterns to integer operators: one form for all quantised models.

qdq           which scale and zero point a tensor has
commute       which operators QuantizeLinear and DequantizeLinear change places with
float_chain   which function of one 8-bit tensor a chain of float operators computes
integerise    which QDQ pattern becomes which integer operator
tables        which functions of one 8-bit tensor become one table
rounded       which sums, averages and normalisations are rounded correctly, where users ask for it (`rounding`)
"""
