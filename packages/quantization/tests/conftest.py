"""The tests' tensors are tiny: one thread is faster than two, and leaves the machine to others."""

import torch

torch.set_num_threads(1)
