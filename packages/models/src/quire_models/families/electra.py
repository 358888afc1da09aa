"""ELECTRA (Clark et al. 2020): BERT whose embedding may be narrower than its layers."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.families.bert import bert_network
from quire_models.pooling_heads import HeadKind, dense, layer_norm, masked_lm, text_classifier, token_classifier
from quire_models.spec import NetworkSpec
from quire_pooling.spec import PoolerSpec

__all__ = ["pooler", "spec"]


def spec(config: Fields) -> NetworkSpec:
    """The embedding is projected behind its norm, where its width is another than that of the layers."""
    size = config.integer("embedding_size", default=128, minimum=1)
    ignored = ("generator_", "discriminator_predictions.")
    return bert_network(config, "electra.", embedding_size=size, ignored=ignored)


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """Heads of their own; logits of words come of vectors as wide as the embedding."""
    size, width = network.hidden_size, network.embedding.size
    if kind == "text_classifier":
        return text_classifier(
            config, size, [dense("classifier.dense", size, size, "gelu_erf")], last="classifier.out_proj"
        )
    if kind == "token_classifier":
        return token_classifier(config, size)
    eps = config.number("layer_norm_eps", default=1e-12, minimum=0.0)
    name = "generator_predictions"
    steps = (dense(f"{name}.dense", size, width, "gelu_erf"), layer_norm(f"{name}.LayerNorm", width, eps))
    weight = network.embedding_name if network.head.tied else "generator_lm_head.weight"
    return masked_lm(size, network.vocab_size, steps, weight=weight, bias="generator_lm_head.bias", width=width)
