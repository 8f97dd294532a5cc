"""Run Programs on a Device, in the order in which a run passes the files.

interface         what every runtime offers: run, run_batch, run_each, check (`RuntimeBase`)
open_device       which Device a name opens; its options are those of the Device's class
prepare           which kernels of a Program run on this machine, whether its memory suffices, how inputs must look
program_runtime   how one run executes the Program's steps: inputs, launches (after how many cycles one counts as hung),
                  CPU steps, outputs, batches in parts
segment           how successive kernels become one call
resident          which bytes of cached inputs are written to the device again
stream            how many samples are in flight, on which accelerator each runs, what happens on an error
run_result        what a run returns (`Result`)
run_report        the fields of a run's report, but for its layers
explain           which numbers a report has of each layer (its row): cycles, bytes, what limits it and the advice for
                  it, from the times of instructions; predicted reports

`driver/show/run_summary.py` prints a report and decides the columns of its tables; `driver/runtime.py` chooses the
runtime of a model.
"""
