"""The modules of this folder that are not tests can be imported by those that are."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
