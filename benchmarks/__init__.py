"""Measure what the project promises: `python -m benchmarks`, or `make bench`."""
