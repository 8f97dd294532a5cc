"""Options of the tuner and their defaults. This file imports nothing, so that `--help` is fast."""

SEARCH_NAMES = ("descent", "climb", "evolution", "annealing", "random")
"""Search algorithms; the first is the default."""
LEARNER_NAMES = ("ridge", "trees")
"""Learners of the cost model; the first is the default."""
DEADLINE = 600.0
"""Default limit of a trial, in seconds."""
