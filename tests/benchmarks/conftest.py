"""Lets these tests `import benchmarks`, which is not installed, and `import small_models`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path += [str(ROOT), str(ROOT / "tests" / "cosim")]
