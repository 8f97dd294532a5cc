"""Text and other sequences from decoders: models that are given a token, and a cache of those before it."""
