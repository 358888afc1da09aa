"""Pooling parameters of a request and of a server: what is taken, and how wrong values are named."""

from __future__ import annotations

import pytest

from quire_interfaces import POOLING_TASKS, ConfigError, PoolerConfig, PoolingParams, RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "reward"),
        ("dimensions", 0),
        ("dimensions", True),
        ("dimensions", 1.5),
        ("use_activation", 1),
        ("step_tag_id", -1),
        ("prompt_length", -1),
        ("expansion_length", -1),
        ("returned_token_ids", ()),
        ("returned_token_ids", 7),
        ("returned_token_ids", "7"),
        ("returned_token_ids", [1, -1]),
        ("returned_token_ids", [0] * 1025),
        ("skip_token_ids", ()),
        ("skip_token_ids", [0.5]),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
        ("extra_kwargs", [1]),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as error:
        PoolingParams(**{field: value})
    assert error.value.param == field


def test_values_at_their_bounds_are_taken() -> None:
    params = PoolingParams(
        task="embed", dimensions=1, use_activation=False, truncate_prompt_tokens=-1, truncation_side="left"
    )
    assert params.dimensions == 1
    assert PoolingParams(truncate_prompt_tokens=1).truncate_prompt_tokens == 1
    assert PoolingParams(step_tag_id=0, returned_token_ids=[3, 1]).returned_token_ids == (3, 1)
    assert [PoolingParams(task=task).task for task in POOLING_TASKS] == list(POOLING_TASKS)


def test_dimensions_are_of_embeddings_only() -> None:
    for task in ("classify", "score", "token_classify"):
        with pytest.raises(RequestError, match=f"dimensions .8. are of embeddings, and task '{task}'") as error:
            PoolingParams(task=task, dimensions=8)
        assert error.value.code == "unsupported_combination"
        with pytest.raises(RequestError, match="dimensions"):
            PoolingParams(dimensions=8).with_task(task)


def test_a_task_is_set_once() -> None:
    params = PoolingParams(use_activation=True).with_task("classify")
    assert params == PoolingParams(task="classify", use_activation=True)
    assert params.with_task("classify") is params
    with pytest.raises(RequestError, match="task must be 'embed' here"):
        params.with_task("embed")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "reward"),
        ("pooling_type", "BEST"),
        ("seq_pooling_type", "ALL"),
        ("tok_pooling_type", "MEAN"),
        ("use_activation", "yes"),
        ("dimensions", 0),
        ("dimensions", 8.0),
        ("enable_chunked_processing", 1),
        ("max_embed_len", 0),
        ("logit_mean", float("nan")),
        ("logit_sigma", 0),
        ("logit_bias", "0"),
        ("logit_scale", 0),
        ("step_tag_id", -1),
        ("returned_token_ids", [-1]),
    ],
)
def test_a_wrong_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as error:
        PoolerConfig.from_dict({field: value})
    assert error.value.field == field


def test_the_pooling_type_is_that_of_its_kind_in_any_case() -> None:
    assert PoolerConfig(pooling_type="mean").seq_pooling_type == "MEAN"
    assert PoolerConfig(pooling_type="Step").tok_pooling_type == "STEP"
    assert PoolerConfig(seq_pooling_type="cls", tok_pooling_type="all").seq_pooling_type == "CLS"
    with pytest.raises(ConfigError, match="pooling_type and seq_pooling_type say two things: 'LAST', 'CLS'"):
        PoolerConfig(pooling_type="LAST", seq_pooling_type="CLS")


def test_older_names_are_taken() -> None:
    config = PoolerConfig.from_dict(
        {"normalize": False, "logit_bias": 0.5, "logit_scale": 4, "returned_token_ids": [5]}
    )
    assert (config.use_activation, config.logit_mean, config.logit_sigma) == (False, 0.5, 0.25)
    assert config.returned_token_ids == (5,)
    for name in ("task", "pooling_task", "pooling_target"):
        assert PoolerConfig.from_dict({name: "token_classify"}).task == "token_classify"
    with pytest.raises(ConfigError, match="normalize and use_activation say two things"):
        PoolerConfig.from_dict({"use_activation": True, "normalize": False})
    with pytest.raises(ConfigError, match="logit_bias and logit_mean say two things"):
        PoolerConfig(logit_bias=1.0, logit_mean=2.0)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no field 'pooling'; it has .*pooling_type"):
        PoolerConfig.from_dict({"pooling": "MEAN"})
    with pytest.raises(ConfigError, match="must be an object"):
        PoolerConfig.from_dict([])  # type: ignore[arg-type]
