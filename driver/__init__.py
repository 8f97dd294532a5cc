"""The host's side: running Programs on a Device, and the command line."""
