"""LayerNorm and RMSNorm: the engine that computes the factors by which the lanes normalise the rows of a VECTOR.

    engine.py     connects the parts, each of which works on another row; decides how many rows are under way, and holds
                  the memory for the factors of all rows (values of rows stay in vin)
    addresses.py  which entries of vin are read, and when a row begins
    moments.py    sums of a row's values and of their squares
    variance.py   mean and variance from the sums
    root.py       inverse square root of the variance
    factors.py    the numbers that lanes apply to a row: offset, shift and factor

`sim/functional/norm.py` defines the arithmetic. `hw/spec/pipeline.py` limits rows and elements, and has the bits of
epsilon, root and factors.
"""
