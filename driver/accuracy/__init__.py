"""Accuracy of a model: differences from onnxruntime, and from its labels.

In the order in which data passes them:

- `compare.py`: runs one input through the accelerator, onnxruntime and the float model; decides which tensors differ
- `matching.py`: decides which float tensor a quantised tensor stands for, also where their names differ
- `evaluate.py`: runs a data set; computes all figures of `celosia eval`: top-1 and top-5 accuracy, speed, agreement
  with onnxruntime

`driver/data/` reads the samples. `driver/workstation/oracle.py` runs onnxruntime. `driver/show/compare_summary.py`
prints the results.
"""
