"""Builds the kernels for AMD GPUs with none: `python -m quire_kernels_rocm.ahead_of_time`.

See `quire_kernels_cuda.ahead_of_time`, whose command line this is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quire_kernels_cuda.ahead_of_time import main

if __name__ == "__main__":
    sys.exit(main("quire_kernels_rocm.platform", "AMD", Path(__file__).with_name("resources.csv")))
