"""Softmax: the engine that executes VECTORs with `softmax`, bit for bit as onnxruntime's QLinearSoftmax.

    engine.py          connects the parts; which VECTOR it accepts
    read_scheduler.py  in which cycles the three address generators read vin, and when a tile begins (the order of their
                       turns, rows of a tile and bits of a quotient: hw/spec/pipeline.py)
    addresses.py       which entries they read
    row_max.py         the largest byte of each row
    sum_addresses.py   which elements are added up
    lane.py            a lane: sums of some rows, quotients of some elements; the tables of powers and shares (number of
                       lanes: `softmax` of a Config)
    adder.py           addition of float32
    divider.py         division, rounding, zero point, clipping
    result_writer.py   where results are written
    steps.py           pipeline registers of a step

A *power* is e^(scale * distance) for the distance of a byte from the largest one of its row, from a table. A *share* is
the power divided by the scale of the result, from another table. A result is the share divided by the sum of the row's
powers.
"""
