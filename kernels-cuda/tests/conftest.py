"""With a GPU the tests run on it; without one under Triton's interpreter, asked for before Triton is imported."""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "packages/ops/tests"))  # ops_layouts
sys.path.append(str(Path(__file__).parents[2] / "packages/models/tests"))  # models_paged_driver
