"""What each instruction computes, and the device that executes it."""
