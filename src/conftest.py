"""Modules for PyTorch are searched for doctests where it is installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") and find_spec("torchao") else ["celosia/driver/torch/*"]
