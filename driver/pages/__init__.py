"""Pages of figures in a browser."""
