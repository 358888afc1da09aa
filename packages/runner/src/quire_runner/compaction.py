"""After a tree of drafts was verified: what was kept of it is put into one line.

Tokens of a tree lie in the cache one behind another, as they stand in the tree. The next step expects those that came
true right behind the known ones, in the order of their positions.
"""

from __future__ import annotations

import numpy as np

from quire_ops import to_device
from quire_runner.inputs import HostPlan, Layers
from quire_runner.kv_cache import copy_tokens
from quire_runner.rows import Rows

__all__ = ["compact_accepted_kv"]


def compact_accepted_kv(plan: HostPlan, rows: Rows, layers: Layers) -> None:
    """Move the keys and values of the tokens of `plan.kept` to where their positions are."""
    which: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for row, start in zip(plan.rows.tolist(), plan.start.tolist(), strict=True):
        for to, place in enumerate(plan.kept.get(row, ())):
            if place != to:
                which.append(row)
                sources.append(start + place)
                targets.append(start + to)
    if not which:
        return
    device = rows.token_ids.device
    row_of, begin, end = (to_device(np.array(each), device) for each in (which, sources, targets))
    slots = []
    for table in rows.block_tables:
        size = table.block_size
        slots.append([table.table[row_of, places // size].long() * size + places % size for places in (begin, end)])
    for group, cache in zip(layers.group_of_layer, layers.kv_caches, strict=True):
        copy_tokens(cache, rows.block_tables[group].block_size, *slots[group])
