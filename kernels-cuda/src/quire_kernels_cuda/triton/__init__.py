"""The kernels, in Triton: the same source for the GPUs of all vendors.

Importing a module of this package needs Triton. Under Triton's interpreter, the interpreter is repaired first.
"""

from __future__ import annotations

import os

from quire_kernels_cuda.availability import is_interpreted

if is_interpreted():
    from quire_kernels_cuda.interpreter import repair

    repair()

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
"""Products and sums become one instruction. Triton's default depends on its version, which warns if it is left open."""

__all__: list[str] = []
