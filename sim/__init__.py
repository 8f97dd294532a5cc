"""Simulators of the accelerator behind one Device protocol."""
