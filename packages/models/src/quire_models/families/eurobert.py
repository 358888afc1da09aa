"""EuroBERT (Boizard et al. 2025): Llama whose tokens see all of their text."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.bidirectional import as_encoder
from quire_models.families import llama
from quire_models.pooling_heads import HeadKind, dense, masked_lm, text_classifier, token_classifier
from quire_models.spec import CheckpointNames, NetworkSpec
from quire_pooling.spec import NO_HEAD, PoolerSpec

__all__ = ["pooler", "spec"]


def spec(config: Fields) -> NetworkSpec:
    """Names of a body alone have no prefix."""
    network = llama.spec(config.with_default("rms_norm_eps", 1e-5).with_default("rope_theta", 250_000.0))
    names = CheckpointNames(default_prefix="model.", ignored_prefixes=("lm_head.", "dense.", "classifier."))
    return as_encoder(replace(network, checkpoint=names), config)


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """Classes of a text are those of its first token, of the mean of all, or the mean of those of all, as config.json
    says."""
    size = network.hidden_size
    if kind == "token_classifier":
        return token_classifier(config, size)
    if kind == "masked_lm":
        weight = network.embedding_name if network.head.tied else "lm_head.weight"
        bias = "lm_head.bias" if config.flag("mlp_bias", default=False) else None
        return masked_lm(size, network.vocab_size, (), weight=weight, bias=bias)
    config.fixed("classifier_pooling", "bos", "mean", "late")
    method = config.text("classifier_pooling", default="late")
    steps = [dense("dense", size, size, "gelu_erf")]
    classifier = text_classifier(config, size, steps, method="CLS" if method == "bos" else "MEAN")
    return replace(classifier, token_head=classifier.head, head=NO_HEAD) if method == "late" else classifier
