"""Choices of the tuner's users, and defaults: imports nothing, for `--help`."""

SEARCH_NAMES = ("descent", "climb", "evolution", "annealing", "random")
"""Searches; the first is the default."""
LEARNER_NAMES = ("ridge", "trees")
"""What learns from trials; the first is the default."""
DEADLINE = 600.0
"""Seconds that a trial may take."""
