"""Layers to launches: form blocks, order layers so that they overlap, plan memory, assemble the Program."""
