"""Samples, images and arrays from a user's files.

- `arrays.py`: reads the inputs of one run (`--input`, `--random`), and writes its outputs
- `images.py`: decides how an image file becomes an input: size, colours, mean and standard deviation
- `calibration.py`: many samples, without labels, from a folder, archive or arrays; decides which are picked
- `dataset.py`: the same with labels, to measure accuracy
"""
