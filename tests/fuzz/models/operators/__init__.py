"""Single operators with random attributes: each function adds one node to a Net and returns its outputs."""
