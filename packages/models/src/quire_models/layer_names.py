"""What a linear layer may be called in a checkpoint. Free of torch.

Networks take queries, keys, values, gate and up one by one; checkpoints may hold them in one matrix, and whoever wrote
a configuration may have meant either. Knows names; does not know files.
"""

from __future__ import annotations

import re

__all__ = ["names_of_layer", "names_rule"]

_OF_QUERIES = ("qkv_proj", "query_key_value", "Wqkv", "c_attn", "qkv", "W_pack")
_OF_GATES = ("gate_up_proj", "input_linear", "Wi")
_WHOLES = {
    "q_proj": _OF_QUERIES,
    "k_proj": _OF_QUERIES,
    "v_proj": _OF_QUERIES,
    "gate_proj": (*_OF_GATES, "w1"),
    "up_proj": (*_OF_GATES, "w3"),
    "down_proj": ("w2", "output_linear"),
    "w1": ("gate_proj", "w13"),
    "w3": ("up_proj", "w13"),
    "w2": ("down_proj",),
    "embed_out": ("lm_head",),
}
"""Last part of a layer's name -> the matrices that it may be a part of, or what else it is called."""
_EXPERT = re.compile(r"\.experts\.\d+\.(\w+)$")
_STACKS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj",
           "down_proj": "down_proj", "w2": "down_proj"}  # fmt: skip
"""Matrix of an expert -> the tensor that may hold it for all experts of a layer."""
_BODIES = ("transformer.", "model.")
"""What the first checkpoints of some families, and drafts, leave out."""


def names_of_layer(layer: str) -> tuple[str, ...]:
    """Names under which a layer may be stored, its own first."""
    outer, dot, last = layer.rpartition(".")
    names = [layer, *(f"{outer}{dot}{whole}" for whole in _WHOLES.get(last, ()))]
    if (expert := _EXPERT.search(layer)) is not None and expert[1] in _STACKS:
        names.append(f"{layer[: expert.start()]}.experts.{_STACKS[expert[1]]}")
    for body in _BODIES:
        if layer.startswith(body):
            names += [name.removeprefix(body) for name in names if name.startswith(body)]
    return tuple(names)


def names_rule(rule: str, name: str) -> bool:
    """Whether a rule of a configuration means the layer of this name: a regular expression behind "re:", or the name,
    the end of it, or what it is a part of; a dot at the end of a rule makes no difference."""
    if rule.startswith("re:"):
        return re.match(rule[3:], name) is not None
    part = rule.rstrip(".")
    return bool(part) and f".{part}." in f".{name}."
