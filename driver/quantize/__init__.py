"""Float models to models of 8-bit integers."""
