"""Text output of commands: tables and sentences, as Rich renderables.

text_table          how a table and its numbers look; the console
progress            what a command shows on standard error while it works
program_summary     compile, inspect: overview, operators, layers, buffers, passes, loops, disassembly
run_summary         run, inspect --estimate, demo: cycles, the table of layers and its columns (also ratios of numbers
                    that a layer's row has, such as shares of its cycles), advice, blocks, outputs
compare_summary     compare, eval (what eval computes: `driver/accuracy/evaluate.py`)
quantize_summary    quantize
tune_summary        tune; its progress line is also that of others
tune_cpu_summary    tune --device cpu
optimise_summary    optimise, inspect --derivation
explore_summary     explore
generate_summary    generate
rehearse_summary    rehearse
bitstream_summary   bitstream report, bitstream timing
hardware_summary    configs, boards, sweep, doctor, cache

`driver/pages/` makes pages for browsers; the numbers come from the reports of each command: of a layer in a run from
`driver/run/explain.py`, of the others from the command's own folder (`driver/accuracy/`, `driver/explore/`, ...).
"""
