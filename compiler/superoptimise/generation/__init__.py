"""Generate rewriting rules: enumerate terms, compare fingerprints, prune, prove, and keep what wins on a network."""
