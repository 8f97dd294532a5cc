"""Rules that nobody wrote: all small terms of a vocabulary, equal ones by fingerprint, pruned, and proved."""
