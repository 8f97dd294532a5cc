"""The accelerator of the board that this runs on."""
