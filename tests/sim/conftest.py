"""Let these tests `import programs` and `import small_models`."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("", "cosim")]
