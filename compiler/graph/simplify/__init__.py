"""Simplification: passes that leave the bytes as they are. In the order in which `pipeline.PASSES` runs them:

fold                      which operators on constants are computed when the model is compiled, up to which size (inside
                          CPU kernels: cpu/kernels)
identities                which operators change nothing, and which two become one (two Transposes, Casts, Clips, ...)
batchnorm                 which scales and offsets of channels move into weights
channels                  which output channels convolutions compute, and in which order: selections behind them move
                          into their weights
transposed_convolutions   which convolutions replace a float transposed one
redundant                 which operators compute the same as others, and which compute nothing that is read
blocked_layout            which float images lie in blocks of channels for the CPU
"""
