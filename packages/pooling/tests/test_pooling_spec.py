"""A pooler as data: sizes, tensors, and what a server's settings change."""

from __future__ import annotations

import dataclasses

import pytest

from quire_interfaces import ConfigError, PoolerConfig, PoolingParams, RequestError
from quire_pooling import DenseSpec, LayerNormSpec, PoolerSpec, PoolingHeadSpec, TokenTaskSpec

DENSE = DenseSpec(weight="dense.weight", bias="dense.bias", in_features=16, out_features=6)
NORM = LayerNormSpec(weight="norm.weight", size=8, eps=1e-5)


def test_sizes_go_through_methods_and_heads() -> None:
    assert PoolerSpec(hidden_size=8).embedding_size == 8
    assert PoolerSpec(hidden_size=8, methods=("CLS", "MEAN")).embedding_size == 16
    head = PoolingHeadSpec(steps=(DENSE, LayerNormSpec(weight="n", size=6, eps=1e-5)))
    assert PoolerSpec(hidden_size=8, methods=("CLS", "MEAN"), head=head).embedding_size == 6
    vocabulary = PoolingHeadSpec(steps=(NORM, DenseSpec(weight="decoder", in_features=8, out_features=100)))
    assert PoolerSpec(hidden_size=8, methods=("MAX",), token_head=vocabulary).embedding_size == 100


def test_tensors_of_all_heads_are_listed() -> None:
    sparse = TokenTaskSpec(head=PoolingHeadSpec(steps=(DenseSpec(weight="s", in_features=8, out_features=1),)))
    spec = PoolerSpec(
        hidden_size=8,
        token_head=PoolingHeadSpec(steps=(NORM,)),
        head=PoolingHeadSpec(steps=(DENSE,)),
        token_tasks={"token_classify": sparse},
    )
    assert spec.shapes() == {"norm.weight": (8,), "dense.weight": (6, 16), "dense.bias": (6,), "s": (1, 8)}


def test_settings_of_the_server_go_before_the_checkpoint() -> None:
    spec = PoolerSpec(hidden_size=8, methods=("CLS",), activation="sigmoid", logit_mean=1.0)
    assert spec.with_config(PoolerConfig()) == spec
    config = PoolerConfig(
        seq_pooling_type="MEAN", tok_pooling_type="STEP", logit_mean=0.0, logit_sigma=2.0, step_tag_id=0
    )
    changed = spec.with_config(config)
    assert (changed.methods, changed.token_method, changed.step_tag_id) == (("MEAN",), "STEP", 0)
    assert (changed.logit_mean, changed.logit_sigma) == (0.0, 2.0)
    raw = spec.with_config(PoolerConfig(use_activation=False))
    assert (raw.normalize, raw.use_activation, raw.activation) == (False, False, "sigmoid")
    cut = dataclasses.replace(spec, dimensions=(4, 2)).with_config(PoolerConfig(dimensions=4))
    assert cut.default_dimensions == 4
    with pytest.raises(ConfigError, match="dimensions must be one of 4, 2, got 3") as error:
        dataclasses.replace(spec, dimensions=(4, 2)).with_config(PoolerConfig(dimensions=3))
    assert error.value.field == "dimensions"
    with pytest.raises(ConfigError, match=r"dimensions .3. cannot be chosen"):
        spec.with_config(PoolerConfig(dimensions=3))


def test_the_server_bounds_texts_that_are_embedded() -> None:
    spec = PoolerSpec(hidden_size=8)
    assert (spec.max_embed_len, spec.embeds_in_chunks) == (None, False)
    for in_chunks in (False, True):
        bounded = spec.with_config(PoolerConfig(max_embed_len=50, enable_chunked_processing=in_chunks))
        assert (bounded.max_embed_len, bounded.embeds_in_chunks) == (50, in_chunks)


def test_adapters_of_tasks_are_chosen_by_requests_where_none_is_merged() -> None:
    spec = PoolerSpec(hidden_size=8, embedding_tasks=("find", "tell"))
    assert spec.resolve(PoolingParams(embedding_task="tell")).embedding_task == "tell"
    merged = dataclasses.replace(spec, merged_task="find")
    assert merged.resolve(PoolingParams(embedding_task="find")).embedding_task == "find"
    for pooler, task, message in (
        (PoolerSpec(hidden_size=8), "find", "no adapters of tasks"),
        (spec, "sort", "it has those of find, tell"),
        (merged, "tell", "embeds all texts for the task find"),
    ):
        with pytest.raises(RequestError, match=message) as error:
            pooler.resolve(PoolingParams(embedding_task=task))
        assert error.value.param == "embedding_task"


def test_the_task_of_requests_that_name_none() -> None:
    spec = PoolerSpec(hidden_size=8)
    assert spec.resolve(PoolingParams()).task == "embed"
    by_token = spec.with_config(PoolerConfig(task="token_embed"))
    assert by_token.resolve(PoolingParams()).task == "token_embed"
    assert by_token.resolve(PoolingParams(task="embed")).task == "embed"
    rewards = PoolerSpec(hidden_size=8, tasks=frozenset({"classify", "score", "token_classify"}))
    assert rewards.default_task == "token_classify"
    classes = PoolerSpec(hidden_size=8, tasks=frozenset({"classify"}))
    assert classes.with_config(PoolerConfig(task="token_classify")).tasks == {"classify", "token_classify"}
    assert classes.with_config(PoolerConfig()).tasks == {"classify"}
    with pytest.raises(ConfigError, match="one of this model's, embed, token_embed; is 'token_classify'") as error:
        spec.with_config(PoolerConfig(task="token_classify"))
    assert error.value.field == "task"


def test_steps_are_those_of_the_request_or_else_of_the_checkpoint() -> None:
    spec = PoolerSpec(
        hidden_size=8,
        token_method="STEP",
        step_tag_id=0,
        returned_token_ids=(3, 1),
        tasks=frozenset({"token_classify", "embed"}),
    )
    own = spec.resolve(PoolingParams(task="token_classify"))
    assert (own.step_tag_id, own.returned_token_ids) == (0, (3, 1))
    asked = spec.resolve(PoolingParams(task="token_classify", step_tag_id=5, returned_token_ids=(2,)))
    assert (asked.step_tag_id, asked.returned_token_ids) == (5, (2,))
    text = spec.resolve(PoolingParams(task="embed"))
    assert (text.step_tag_id, text.returned_token_ids) == (None, None)


def test_dimensions_of_the_server_are_of_embeddings_alone() -> None:
    tasks = frozenset({"embed", "token_embed", "classify"})
    spec = PoolerSpec(hidden_size=8, dimensions=(), tasks=tasks).with_config(PoolerConfig(dimensions=4))
    for task, dimensions in (("embed", 4), ("token_embed", 4), ("classify", None), ("plugin", None)):
        assert spec.resolve(PoolingParams(task=task)).dimensions == dimensions  # type: ignore[arg-type]
    assert spec.resolve(PoolingParams(task="embed", dimensions=8)).dimensions == 8
