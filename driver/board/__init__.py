"""The accelerator on the board that this process runs on."""
