"""Lets tests of the hardware `import bench`, in pytest and in the simulation that it starts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
