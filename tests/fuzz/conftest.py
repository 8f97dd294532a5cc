"""Lets these tests import fuzz, programs and small_models."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "cosim")]
