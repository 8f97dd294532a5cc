"""Run Programs on a Device: the runtime, streams of samples, and the report of a run with its explanation."""
