"""The tests of ops whose work is cut differently for different GPUs, with the tiles and stages of AMD's; on an AMD GPU,
those of all other ops as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_kernels_cuda_fp8 import *  # noqa: F403
from test_kernels_cuda_latent import *  # noqa: F403
from test_kernels_cuda_matmul import *  # noqa: F403
from test_kernels_cuda_moe import *  # noqa: F403
from test_kernels_cuda_vocabulary import *  # noqa: F403
from test_kernels_cuda_w8a8 import *  # noqa: F403

from quire_kernels_cuda.platform import pretending
from quire_kernels_rocm.platform import AMD, AMD_TARGETS

if torch.version.hip is not None and torch.cuda.is_available():
    from test_kernels_cuda_cache import *  # noqa: F403
    from test_kernels_cuda_elementwise import *  # noqa: F403
    from test_kernels_cuda_gated import test_one_kernel_equals_the_reference  # noqa: F401
    from test_kernels_cuda_logit_edits import *  # noqa: F403
    from test_kernels_cuda_lora import *  # noqa: F403
    from test_kernels_cuda_penalties import *  # noqa: F403
    from test_kernels_cuda_recurrent import *  # noqa: F403
    from test_kernels_cuda_rotate_and_write import *  # noqa: F403
    from test_kernels_cuda_rounding import *  # noqa: F403
    from test_kernels_cuda_routing import *  # noqa: F403
    from test_kernels_cuda_row_linear import test_linear_add, test_norm_linear  # noqa: F401
    from test_kernels_cuda_sampling import *  # noqa: F403
    from test_kernels_cuda_step_inputs import *  # noqa: F403

    TARGETS = [AMD.target_of(torch.device("cuda", 0))]
else:
    TARGETS = [AMD_TARGETS[name] for name in ("gfx942", "gfx950", "gfx1100", "gfx1201")]

pytestmark = pytest.mark.skipif(
    torch.version.hip is None and torch.cuda.is_available(), reason="this GPU is not AMD's, and nothing is interpreted"
)


@pytest.fixture(autouse=True, params=TARGETS, ids=lambda target: target.name)
def amd(request: pytest.FixtureRequest) -> Iterator[None]:
    target, module = request.param, request.function.__module__
    if module == "test_kernels_cuda_fp8" and not target.has_fp8:
        pytest.skip(f"{target.name} does not multiply 8-bit floats of this kind")
    if module == "test_kernels_cuda_latent" and target.has_few_registers:
        pytest.skip(f"latent attention does not fit into the registers of {target.name}")
    with pretending(target):
        yield
