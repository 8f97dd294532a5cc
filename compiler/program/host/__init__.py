"""The host runtime, in the order in which a step runs. It imports only numpy and the standard library, for boards.

op               what a host operator is, which errors and sizes are reported, and which function computes it: the table
                 HOST and the decorator `host`
execute          whether numpy or a compiled kernel runs an operator
hostops/         what each operator computes in numpy
kernel_compiler  whether kernels can be compiled and linked on this machine
kernel           how compiled code is called on arrays
thread_team      how many threads run kernels, by default and at most, and which list of calls each works through
                 (which loops they share: cpu/schedule/parallel)

Rules that builders of kernels (compiler/ops) and numpy operators share:

shape_rules      where sliding windows and transposed convolutions read and write, which positions Slice takes, and
                 which shape broadcasting gives
float32_math     how onnxruntime rounds fused products and the logistic function
"""
