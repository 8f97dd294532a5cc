"""Virtual threads to one instruction stream with explicit tokens, and the verifier of such streams."""
