"""Makes `distributed_counting_worker` importable for the tests of this folder, and for the ranks that they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
