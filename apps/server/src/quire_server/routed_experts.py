"""The experts that routers chose, as answers tell them: an array in a file of numpy's, in base64."""

from __future__ import annotations

import base64
import io

from msgspec import UNSET, UnsetType

from quire_engine import CompletionOutput

__all__ = ["experts_text"]


def experts_text(output: CompletionOutput) -> str | UnsetType:
    """`CompletionOutput.routed_experts` as the base64 of a .npy file, read by
    `numpy.load(io.BytesIO(base64.b64decode(text)))`; UNSET where the completion has none."""
    if output.routed_experts is None:
        return UNSET
    import numpy as np

    file = io.BytesIO()
    np.save(file, output.routed_experts, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")
