"""Lets these tests `import vivado` and `import programs`."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
