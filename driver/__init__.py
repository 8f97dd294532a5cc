"""Host side: Programs on a Device, quantising, tuning, exploring, export, and the command line."""
