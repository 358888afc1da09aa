"""Average checkpoints of one network, weight by weight (model soups, Wortsman et al. 2022, arXiv:2203.05482).

Run: python packages/demo-model/train/average.py ONE:0.46 OTHER:0.46 THIRD:0.08 --out FOLDER

FOLDER becomes a copy of the first checkpoint's folder with the averaged weights.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from train import write_manifest


def average(shares: Mapping[Path, float]) -> dict[str, Tensor]:
    """The mean of the weights of checkpoint folders, in bfloat16.

    Args:
        shares: Checkpoint folder -> its weight in the mean. They sum to 1.

    Raises:
        ValueError: the shares do not sum to 1, or a checkpoint has other tensors than the first.
    """
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"shares must sum to 1, got {sum(shares.values()):g}")
    mean: dict[str, Tensor] = {}
    for folder, share in shares.items():
        weights = load_file(folder / "model.safetensors")
        if mean and {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in mean.items()}:
            raise ValueError(f"{folder} has other tensors than {next(iter(shares))}")
        for name, weight in weights.items():
            mean[name] = mean.get(name, torch.zeros(weight.shape)) + share * weight.float()
    return {name: weight.bfloat16() for name, weight in mean.items()}


def main() -> None:
    """Write the average of the given checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoints", nargs="+", metavar="FOLDER:SHARE", help="checkpoint folder and its share")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    args = parser.parse_args()
    shares = {Path(folder): float(share) for folder, _, share in (text.rpartition(":") for text in args.checkpoints)}
    weights = average(shares)
    shutil.copytree(next(iter(shares)), args.out, dirs_exist_ok=True)
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    write_manifest(args.out)


if __name__ == "__main__":
    main()
