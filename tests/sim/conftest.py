"""Lets these tests `import programs`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
