"""Parts of decoders in float64, written from their papers: what networks without a class in Transformers are held to.

Shapes: T tokens, H heads, K key-value heads, D dimensions of a head, E experts. Tensors are float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from models_paged_driver import PagedDriver
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import layer_norm, silu, softmax

from quire_models import DecoderLM, ModelConfig, load_model

__all__ = [
    "VOCAB",
    "Weights",
    "attend",
    "embed",
    "expert_shapes",
    "experts",
    "gated",
    "heads",
    "largest_error",
    "layer_norm_of",
    "linear",
    "rms",
    "rotate",
]

VOCAB = 96
NUM_TOKENS = 23
Weights = Mapping[str, Tensor]


def rms(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """Root mean square norm (Zhang & Sennrich 2019) over the last dimension."""
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return normed if weight is None else normed * (weight + offset)


def layer_norm_of(w: Weights, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer norm (Ba et al. 2016) with a weight and a bias."""
    return layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    """x W^T, and the bias where the checkpoint has one."""
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def heads(x: Tensor, num: int) -> Tensor:
    """[T, H D] -> [T, H, D]."""
    return x.unflatten(-1, (num, -1))


def rotate(x: Tensor, theta: float = 10000.0, dims: int | None = None, *, interleaved: bool = False) -> Tensor:
    """Rotary positions (Su et al. 2021) of [T, H, D], in the first `dims` dimensions: of halves, or of neighbours."""
    size = x.shape[-1] if dims is None else dims
    angles = torch.outer(
        torch.arange(len(x), dtype=torch.float64), theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    part, rest = x[..., :size], x[..., size:]
    if interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = part.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Causal attention of [T, H, D] to [T, K, D]: [T, H D].

    Args:
        window: Tokens that each sees, itself included.
        bias: [H, T, T], added to the scores.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (back < 0) | (back >= (window or len(q)))
    weights = softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)


def gated(
    w: Weights, name: str, x: Tensor, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Tensor:
    """SwiGLU (Shazeer 2020)."""
    gate, up, down = (f"{name}.{each}" for each in names)
    return linear(w, down, silu(linear(w, gate, x)) * linear(w, up, x))


def experts(
    w: Weights,
    name: str,
    x: Tensor,
    *,
    num: int,
    top_k: int,
    score: Callable[[Tensor], Tensor],
    renormalize: bool,
    bias: str = "",
    groups: tuple[int, int] = (1, 1),
    factor: float = 1.0,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Tensor:
    """A mixture of experts, token by token (DeepSeek-V3, sec. 2.1.2).

    Args:
        score: Router's logits [E] -> scores [E].
        bias: Tensor [E] that helps to choose.
        groups: Number of groups, and how many of them a token may take: those whose two best experts are best.
    """
    rows = []
    for token in x:
        scores = score(w[f"{name}.gate.weight"] @ token)
        choice = scores + w[bias] if bias else scores.clone()
        if groups[0] > 1:
            best = choice.view(groups[0], -1).topk(2).values.sum(-1).topk(groups[1]).indices
            for group in set(range(groups[0])) - set(best.tolist()):
                choice.view(groups[0], -1)[group] = -torch.inf
        chosen = choice.topk(top_k).indices
        weights = scores[chosen] / (scores[chosen].sum() if renormalize else 1.0) * factor
        parts = [gated(w, f"{name}.experts.{expert}", token[None], names)[0] for expert in chosen.tolist()]
        rows.append(sum((weight * part for weight, part in zip(weights, parts, strict=True)), torch.zeros_like(token)))
    assert num == len(w[f"{name}.gate.weight"])
    return torch.stack(rows)


def expert_shapes(
    hidden: int, num: int, inner: int, shared: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[int, ...]]:
    """Tensors of a mixture, in the layer."""
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (num, hidden)}
    widths = {f"experts.{number}": inner for number in range(num)} | ({"shared_experts": shared} if shared else {})
    for part, width in widths.items():
        for name in names:
            shapes[f"mlp.{part}.{name}.weight"] = (hidden, width) if name == names[2] else (width, hidden)
    return shapes


def embed(w: Weights, name: str, token_ids: Tensor) -> Tensor:
    """Rows of the table."""
    return w[f"{name}.weight"][token_ids]


def largest_error(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    forward: Callable[[Weights, Tensor], Tensor],
) -> float:
    """The largest error of a logit as a share of the largest logit, of a random checkpoint, computed five tokens at a
    time.

    Args:
        shapes: Name -> shape of the checkpoint's tensors.
        forward: Weights and token ids [T] -> logits [T, vocab], in float64.
    """
    generator = torch.Generator().manual_seed(sum(map(ord, str(config["architectures"]))))
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.2 + (1.0 if len(shape) == 1 and "bias" not in name else 0.0)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    network = load_model(ModelConfig.from_path(folder), folder, dtype="float32")
    assert isinstance(network, DecoderLM)
    token_ids = torch.randint(3, VOCAB, (NUM_TOKENS,), generator=generator)
    driver = PagedDriver(network, block_size=4, shuffle=True)
    sequence = driver.add(token_ids.tolist())
    driver.run(sequence, 5)
    expected = forward({name: tensor.double() for name, tensor in tensors.items()}, token_ids)
    return float((torch.stack(sequence.logits) - expected).abs().max() / expected.abs().max())
