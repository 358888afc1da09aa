"""The EAGLE-3 head in plain torch, shaped for training: it sees its own guesses already while it learns.

Knows the network and its parameters' names in a published head. Knows nothing about text. Follows EAGLE-3 (Li et al.
2025, arXiv:2503.01840): features of three depths of the target are fused, one decoder layer reads them beside the
embedding of the token that follows, and training unrolls several steps in which the head reads its own states
("training-time test", section 3.2).

Shapes: R rows, T tokens in a row, D hidden, H query heads, G KV heads, E head dim, V tokens of the draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from model import LlamaConfig
from torch import Tensor, nn

__all__ = ["EagleHead", "head_from_checkpoint", "head_to_checkpoint"]


class EagleHead(nn.Module):
    """The head of one target.

    Args:
        config: sizes of the layer; ``hidden_size`` is the target's.
        num_features: depths of the target that are read.
        draft_ids: [V] ids of the target's vocabulary that the head can propose, ascending.
    """

    def __init__(self, config: LlamaConfig, num_features: int, draft_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        d, i, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
        width = (heads + 2 * config.num_key_value_heads) * config.head_dim
        self.register_buffer("draft_ids", draft_ids)
        self.fc = nn.Parameter(torch.randn(d, num_features * d) * 0.02)
        self.input_norm = nn.Parameter(torch.ones(d))
        self.hidden_norm = nn.Parameter(torch.ones(d))
        self.qkv = nn.Parameter(torch.randn(width, 2 * d) * 0.02)
        self.out = nn.Parameter(torch.randn(d, heads * config.head_dim) * 0.01)
        self.post_norm = nn.Parameter(torch.ones(d))
        self.gate_up = nn.Parameter(torch.randn(2 * i, d) * 0.02)
        self.down = nn.Parameter(torch.randn(d, i) * 0.01)
        self.norm = nn.Parameter(torch.ones(d))
        self.lm_head = nn.Parameter(torch.randn(len(draft_ids), d) * 0.02)

    def forward(
        self, embedded: Tensor, features: Tensor, rope: tuple[Tensor, Tensor], bases: Tensor, steps: int
    ) -> Tensor:
        """Logits of several guesses in a row, from some positions on.

        Args:
            embedded: [R, T, D] embedding of the token behind each position.
            features: [R, T, num_features * D] of the target.
            rope: cosines and sines [T, E/2].
            bases: [R, M] last position whose features are true; below T - steps.
            steps: S, guesses in a row.

        Returns:
            [S, R, M, V]: in step s, of the token at base + s + 2, from the head's own states behind the base.
        """
        c, (cos, sin) = self.config, rope
        q_size = c.num_attention_heads * c.head_dim
        fused = F.linear(features, self.fc)
        k, v = self._keys_values(F.linear(self._inputs(embedded, fused), self.qkv[q_size:]), cos, sin)
        state = _take(fused, bases)
        own: list[tuple[Tensor, Tensor]] = []
        logits = []
        for step in range(steps):
            at = bases + step
            projected = F.linear(self._inputs(_take(embedded, at), state), self.qkv)
            angles = cos[at], sin[at]
            if step:
                own.append(self._keys_values(projected[..., q_size:], *angles))
            q = _rotate(projected[..., :q_size].unflatten(-1, (-1, c.head_dim)), *angles)
            state = state + F.linear(_attention(q, k, v, own, bases), self.out)
            gate, up = F.linear(self._norm(state, self.post_norm), self.gate_up).chunk(2, -1)
            state = state + F.linear(F.silu(gate) * up, self.down)
            logits.append(F.linear(self._norm(state, self.norm), self.lm_head))
        return torch.stack(logits)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)

    def _inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        return torch.cat((self._norm(embedded, self.input_norm), self._norm(state, self.hidden_norm)), -1)

    def _keys_values(self, projected: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., 2 G E] -> rotated keys and values, each [..., G, E]."""
        keys, values = projected.unflatten(-1, (-1, self.config.head_dim)).chunk(2, -2)
        return _rotate(keys, cos, sin), values


def _take(x: Tensor, places: Tensor) -> Tensor:
    """x [R, T, D] at places [R, M] -> [R, M, D]."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., heads, E] at angles [..., E/2]."""
    low, high = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _attention(q: Tensor, k: Tensor, v: Tensor, own: list[tuple[Tensor, Tensor]], bases: Tensor) -> Tensor:
    """Over true states up to ``bases`` [R, M], then over the head's own ones.

    Shapes: q [R, M, H, E]; k and v [R, T, G, E]; each of ``own`` [R, M, G, E] twice; result [R, M, H * E].
    """
    length, groups = k.shape[1:3]
    q = q.unflatten(2, (groups, -1)) * q.shape[-1] ** -0.5
    scores = torch.einsum("rmgne,rtge->rmgnt", q, k)
    unseen = torch.arange(length) > bases[..., None]
    scores = scores.masked_fill(unseen[:, :, None, None], -torch.inf)
    extra = [torch.einsum("rmgne,rmge->rmgn", q, keys)[..., None] for keys, _ in own]
    weights = torch.cat((scores, *extra), -1).softmax(-1)
    mixed = torch.einsum("rmgnt,rtge->rmgne", weights[..., :length], v)
    for index, (_, values) in enumerate(own):
        mixed = mixed + weights[..., length + index, None] * values.unsqueeze(3)
    return mixed.flatten(2)


def head_to_checkpoint(head: EagleHead, vocab_size: int) -> dict[str, Tensor]:
    """The parameters under the names of published EAGLE-3 heads, in bf16, with both maps of the vocabulary."""
    c = head.config
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    q, k, v = head.qkv.split((q_size, kv_size, kv_size))
    gate, up = head.gate_up.chunk(2)
    layer = {
        "input_layernorm": head.input_norm,
        "hidden_norm": head.hidden_norm,
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": head.out,
        "post_attention_layernorm": head.post_norm,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": head.down,
    }
    tensors = {f"midlayer.{name}.weight": value for name, value in layer.items()}
    tensors |= {"fc.weight": head.fc, "norm.weight": head.norm, "lm_head.weight": head.lm_head}
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    draft_ids = head.draft_ids.cpu()
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[draft_ids] = True
    return {**tensors, "d2t": draft_ids - torch.arange(len(draft_ids)), "t2d": t2d}


def head_from_checkpoint(head: EagleHead, tensors: dict[str, Tensor]) -> None:
    """Fill a head with the parameters of a checkpoint, to go on training."""

    def joined(*names: str) -> Tensor:
        return torch.cat([tensors[f"midlayer.{name}.weight"] for name in names])

    with torch.no_grad():
        head.draft_ids.copy_(tensors["d2t"] + torch.arange(len(tensors["d2t"])))
        head.fc.copy_(tensors["fc.weight"])
        head.input_norm.copy_(joined("input_layernorm"))
        head.hidden_norm.copy_(joined("hidden_norm"))
        head.qkv.copy_(joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
        head.out.copy_(joined("self_attn.o_proj"))
        head.post_norm.copy_(joined("post_attention_layernorm"))
        head.gate_up.copy_(joined("mlp.gate_proj", "mlp.up_proj"))
        head.down.copy_(joined("mlp.down_proj"))
        head.norm.copy_(tensors["norm.weight"])
        head.lm_head.copy_(tensors["lm_head.weight"])
