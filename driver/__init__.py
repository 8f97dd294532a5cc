"""Host side: Programs on a Device, quantising, tuning, exploring, export, and the command line.

runtime      `celosia.Runtime`: which runtime runs a Program, or a model that is compiled when inputs come
run/         one run of a Program: steps, streams of samples, reports and their advice
board/       the accelerator of the board that this process runs on
remote/      boards over ssh
workstation/ onnxruntime, tools, and Programs for open shapes, which boards do not need
quantize/    int8 models from float models
accuracy/    comparison with onnxruntime, accuracy on data sets
data/        samples, images and arrays from files
generate/    text from decoders
tune/        schedules, searched with trials; superoptimised models
explore/     Configs for models on a board
export/      models as C
torch/       PyTorch
te/          tensor expressions in TVM's terms, and kernels of a user's own
cut          a model in parts for several accelerators (`celosia.cut`), which `Relay` runs as a pipeline
rehearse     a deployment to a simulated board, step by step
demo         `celosia demo`
choices      names and defaults of options, for the command's help
notebook     display of progress and results in notebooks
show/        what commands print
pages/       what they write for browsers
cli/         the commands, their options and errors
"""
