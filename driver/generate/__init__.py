"""Generate text and other sequences with decoders: models that take a token, and a cache of those before it."""
