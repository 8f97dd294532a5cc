"""Simplification: passes that leave the bytes as they are. `pipeline.PASSES` has their order.

fold             which operators on constants are computed when the model is compiled, up to which size (inside
                 CPU kernels: cpu/kernels)
redundant        which operators change nothing, which two become one (two Transposes, Casts, Clips, ...), which
                 compute the same as others, and which compute nothing that is read
convolutions     which scales, offsets, selections and orders of channels move into the weights before them, and
                 which convolutions replace a float transposed one
blocked_layout   which float images lie in blocks of channels for the CPU
"""
