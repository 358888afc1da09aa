"""Products of bytes by torch's libraries (cuBLASLt, CUTLASS), for many rows: these take as long as their operations,
which the libraries reach more of than our kernels; fewer rows take as long as the weight's bytes.

A form of product serves on a GPU once a small one of it gave there what it should; where it fails later, it is left
out from then on. Knows neither tables nor kernels.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from quire_kernels_cuda.platform import Platform, pretended_target
from quire_ops.activation_quant import FP8_GROUP

__all__ = ["FORMS", "MANY_ROWS", "FormState", "fp8_product", "int8_sums", "is_served", "report", "takes"]

MANY_ROWS = 256
"""Rows from which on a product is bound by operations: an H100's 8-bit ones take 230 for each byte of its memory."""
FORMS = {"int8": "int8", "fp8": "fp8 with scales of rows", "fp8-groups": "fp8 with scales of groups"}
"""Form -> how reports call it."""
_ALIGNED = 16
"""Elements that cuBLASLt's rows of bytes are multiples of."""
_logger = logging.getLogger(__name__)


class FormState(NamedTuple):
    """Whether a form serves on a device."""

    reason: str | None
    """Why not, or None."""


_states: dict[tuple[str, torch.device], FormState] = {}


def takes(form: str, num_rows: int, num_outputs: int, inputs: int) -> bool:
    """Whether a product is large enough, and its sides are such as libraries take."""
    step = FP8_GROUP if form == "fp8-groups" else _ALIGNED
    return num_rows >= MANY_ROWS and num_outputs % _ALIGNED == 0 and inputs % step == 0


def is_served(form: str, device: torch.device, platform: Platform) -> bool:
    """Whether a form serves on a device; found out once, by trying, but not while launches are recorded or captured."""
    if device.type == "meta" or pretended_target() is not None:
        return False
    state = _states.get((form, device))
    if state is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        state = _states[form, device] = FormState(_why_not(form, device, platform))
    return state.reason is None


def report(device: torch.device, platform: Platform) -> str:
    """For the start-up report: by what many rows are multiplied."""
    if platform.target_of(device).vendor != "cuda":
        return f"products of {MANY_ROWS} rows and more: by our kernels, torch's library is tried on NVIDIA GPUs only"
    served = [name for form, name in FORMS.items() if is_served(form, device, platform)]
    refused = [
        f"{name} by our kernel ({state.reason})"
        for form, name in FORMS.items()
        if (state := _states.get((form, device))) is not None and state.reason is not None
    ]
    parts = ([f"{', '.join(served)} by torch's library"] if served else []) + refused
    return f"products of {MANY_ROWS} rows and more: {'; '.join(parts)}"


def int8_sums(tokens: Tensor, weight: Tensor, out: Tensor) -> bool:
    """out [N, O] int32 = tokens [N, I] @ weight [O, I].T, exactly; False where the library refused."""
    try:
        torch._int_mm(tokens, weight.t(), out=out)
    except RuntimeError as error:
        _leave_out("int8", tokens.device, error)
        return False
    return True


def fp8_product(tokens: Tensor, steps: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor | None:
    """(tokens * steps) @ (weight * scale).T + bias in bfloat16 [N, O]; None where the library refused.

    Args:
        tokens: [N, I] float8_e4m3fn.
        steps: [N, G] float32; G is 1 or I / 128.
        weight: [O, I] float8_e4m3fn.
        scale: [O, G] float32.
        bias: [O] bfloat16; None with scales of groups.
    """
    try:
        return _scaled_mm(tokens, steps, weight, scale, bias)
    except (RuntimeError, ValueError) as error:
        _leave_out("fp8" if scale.shape[1] == 1 else "fp8-groups", tokens.device, error)
        return None


def _scaled_mm(tokens: Tensor, steps: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    if scale.shape[1] == 1:
        of_rows, of_outputs = steps.contiguous(), scale.contiguous().view(1, -1)
    else:  # cuBLASLt reads the scales of a group side by side
        of_rows, of_outputs = steps.t().contiguous().t(), scale.t().contiguous()
    return torch._scaled_mm(
        tokens, weight.t(), scale_a=of_rows, scale_b=of_outputs, bias=bias, out_dtype=torch.bfloat16
    )


def _leave_out(form: str, device: torch.device, error: Exception) -> None:
    reason = str(error).splitlines()[0]
    _logger.warning("torch's product of %s failed and is left out from now on: %s", FORMS[form], reason)
    _states[form, device] = FormState(reason)


def _why_not(form: str, device: torch.device, platform: Platform) -> str | None:
    target = platform.target_of(device)
    if target.vendor != "cuda":
        return "tried on NVIDIA GPUs only"
    if form != "int8" and not target.has_fp8:
        return f"{target.name} does not multiply 8-bit floats"
    if form == "fp8-groups" and target.name != "sm_90":
        return "cuBLASLt has scales of 128 numbers for compute capability 9.0 only"
    error = _probe_error(form, device)
    return None if error is None else f"torch {torch.__version__} did not compute it: {error}"


def _probe_error(form: str, device: torch.device) -> str | None:
    """What goes wrong with a product whose every sum is exact, or None."""
    num_rows, num_outputs, inputs = MANY_ROWS, 128, 2 * FP8_GROUP
    tokens = ((torch.arange(num_rows)[:, None] * 7 + torch.arange(inputs) * 5) % 3 - 1).to(device)
    weight = ((torch.arange(num_outputs)[:, None] * 11 + torch.arange(inputs) * 13) % 5 - 2).to(device)
    try:
        if form == "int8":
            got = torch._int_mm(tokens.to(torch.int8), weight.to(torch.int8).t()).double()
            wanted = tokens.double() @ weight.double().T
        else:
            groups = 1 if form == "fp8" else inputs // FP8_GROUP
            steps, scale = (
                2.0 ** ((torch.arange(rows * groups) * 3 % 7).view(rows, groups).to(device) - 3).float()
                for rows in (num_rows, num_outputs)
            )
            left, right = (
                whole.double() * factor.double().repeat_interleave(inputs // groups, dim=1)
                for whole, factor in ((tokens, steps), (weight, scale))
            )
            wanted = left @ right.T
            numbers, elements = (whole.float().to(torch.float8_e4m3fn) for whole in (tokens, weight))
            got = _scaled_mm(numbers, steps, elements, scale, None).double()
    except Exception as error:  # whatever a build of torch raises of what it has not
        return str(error).splitlines()[0]
    error_share = float((got - wanted).abs().max() / wanted.abs().max())
    return None if error_share < 0.01 else f"the results are {error_share:.0%} away"
