"""Layers of the accelerator to loops of tiles, whose bodies are its instructions."""
