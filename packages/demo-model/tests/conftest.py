"""Makes the scripts of ``train/`` importable for the tests that evaluate the checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
