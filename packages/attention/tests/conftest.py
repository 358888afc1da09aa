"""The tests' tensors are tiny: one thread is faster than two, and leaves the machine to others.

Makes `attention_sequences` importable for the tests of this folder.
"""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))
