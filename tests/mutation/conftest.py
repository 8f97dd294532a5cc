"""Lets these tests import mutation and proofs."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "formal")]
