"""The number formats that the kernels take, by their numbers in the C interface (`csrc/kernels.cpp`)."""

from __future__ import annotations

import torch

__all__ = ["DTYPES"]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
