"""QDQ patterns to integer operators: one form for all quantised models.

integerise    which QDQ pattern becomes which integer operator; it runs the next two
commute       which operators QuantizeLinear and DequantizeLinear change places with
float_chain   which function of one 8-bit tensor a chain of float operators computes
tables        which functions of one 8-bit tensor become one table (which single functions: numerics/tables)
rounded       which sums, averages and normalisations are rounded correctly, where users ask for it (`rounding`)
"""
