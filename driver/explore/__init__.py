"""Search over Configs for models on a board, and the Pareto front that it finds; sweeps over fields of a Config."""
