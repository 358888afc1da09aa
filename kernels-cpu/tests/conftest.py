"""Makes `kernels_cpu_steps` importable for the tests of this folder.

Two threads, also where there are more cores: the tests are about sharing work, not about speed.
"""

import sys
from pathlib import Path

import torch

torch.set_num_threads(2)
sys.path.insert(0, str(Path(__file__).parent))
