"""Let these tests `import mutants`, `import quantised_models`, `import sweep` and `import wrong_rules`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
