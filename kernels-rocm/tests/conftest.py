"""With an AMD GPU the tests run on it; without one under Triton's interpreter, asked for before Triton is imported."""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)
for folder in ("packages/ops/tests", "kernels-cuda/tests"):  # ops_layouts, kernels_cuda_attention_cases
    sys.path.insert(0, str(Path(__file__).parents[2] / folder))
