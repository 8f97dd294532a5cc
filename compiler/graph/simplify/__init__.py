"""Simplification: passes that leave the bytes as they are.

fold                      which operators on constants are computed when the model is compiled
identities                which operators change nothing, and which two become one
batchnorm                 which scales and offsets of channels move into weights
channels                  which selections and orders of channels move into weights
transposed_convolutions   which convolutions replace a transposed one
redundant                 which operators compute what another does, or what nothing reads
blocked_layout            which images lie in blocks of channels for the CPU
"""
