"""A tower alone beside what the machine multiplies: `python tower_speed.py CHECKPOINT [--num-threads 1] [--side 728]`.

Prints seconds for one image through the tower, the operations of its products (attention's included), the rate of
torch's products of 2048 x 2048 measured in turn with it, and the share of that rate that the tower reaches. CPU time of
the process counts, so that other programs on the machine do less harm.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from quire_models import ModelConfig
from quire_models.stored_linears import check_towers
from quire_models.towers.native import load_native_towers
from quire_models.transformers_backend.towers import load_towers

ROUNDS = 7


def image(spec: Any, side: int) -> dict[str, torch.Tensor]:
    """An item of about `side` x `side` pixels as the tower takes it."""
    patch = spec.patch
    if hasattr(spec, "image_size"):
        tiles = max(1, (side // spec.image_size) ** 2)
        return {"pixel_values": torch.randn(1, tiles, patch.num_channels, spec.image_size, spec.image_size)}
    rows = side // patch.patch_size // spec.merge_size * spec.merge_size
    numbers = patch.num_channels * patch.num_frames * patch.patch_size**2
    return {"pixel_values": torch.randn(rows * rows, numbers), "image_grid_thw": torch.tensor([[1, rows, rows]])}


def cpu_seconds(run: Any) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--side", type=int, default=728)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    config, dtype, device = ModelConfig.from_path(args.checkpoint), torch.bfloat16, torch.device("cpu")
    media, names = config.media, config.language_names
    assert media is not None
    assert media.tower is not None
    assert names is not None
    check_towers(args.checkpoint, names)
    backend: Any = None
    native = load_native_towers(media, names, args.checkpoint, dtype, device, backend)
    theirs = load_towers(config, args.checkpoint, dtype, device)
    item = image(media.tower, args.side)
    with FlopCounterMode(display=False) as counter:
        theirs.encode("image", [item])
    operations = counter.get_total_flops()
    matrix = torch.randn(2048, 2048).to(dtype)
    times: dict[str, list[float]] = {"quire": [], "transformers": [], "product": []}
    for _ in range(ROUNDS):
        times["product"].append(cpu_seconds(lambda: matrix @ matrix))
        times["quire"].append(cpu_seconds(lambda: native.encode("image", [item])))
        times["transformers"].append(cpu_seconds(lambda: theirs.encode("image", [item])))
    rate = 2 * 2048**3 / median(times["product"])
    print(f"{operations / 1e9:.0f} G operations; products run at {rate / 1e12:.3f} T/s of CPU time")
    for name in ("quire", "transformers"):
        seconds = median(times[name])
        print(f"{name}: {seconds:.2f} s of CPU time, {operations / seconds / rate:.0%} of that rate")


if __name__ == "__main__":
    main()
