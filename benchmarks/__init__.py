"""What the project promises, measured: `python -m benchmarks`, or `make bench`."""
