"""Programs as C: what needs no Python where it runs."""
