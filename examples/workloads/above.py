"""Make the modules of the other examples, one folder up, importable: imported before any of them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
