"""The pooler: tasks, parameters, whole texts and chunks, against formulas of torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire_interfaces import PoolingParams, RequestError
from quire_ops import op_table
from quire_ops.backends import replaced_backends
from quire_pooling import (
    Activation,
    ActivationSpec,
    DenseSpec,
    Pooler,
    PoolerSpec,
    PoolingHeadSpec,
    TokenTaskSpec,
)
from quire_pooling.activations import activate_with

H = 32
LENS = [3, 1, 65, 130, 7]
CLASSES = PoolingHeadSpec(
    steps=(
        DenseSpec(weight="d.w", bias="d.b", in_features=H, out_features=H, activation="tanh"),
        DenseSpec(weight="c.w", bias="c.b", in_features=H, out_features=4),
    )
)
EMBED, CLASSIFY = PoolingParams(task="embed"), PoolingParams(task="classify")
TOKEN_EMBED, TOKEN_CLASSIFY = PoolingParams(task="token_embed"), PoolingParams(task="token_classify")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(spec: PoolerSpec) -> dict[str, Tensor]:
    return {name: numbers(*shape, seed=seed) for seed, (name, shape) in enumerate(spec.shapes().items(), 10)}


@pytest.fixture
def hidden() -> Tensor:
    return numbers(sum(LENS), H)


@pytest.fixture
def token_ids() -> Tensor:
    return torch.arange(sum(LENS)) % 11


def chunked(pooler: Pooler, hidden: Tensor, token_ids: Tensor, params: list[PoolingParams], size: int) -> list[Tensor]:
    states = [pooler.begin(each) for each in params]
    for state, text, ids in zip(states, hidden.split(LENS), token_ids.split(LENS), strict=True):
        for chunk, some_ids in zip(text.split(size), ids.split(size), strict=True):
            state.add(chunk, some_ids)
    return pooler.finish(states)


CASES = {
    "mean": (PoolerSpec(hidden_size=H, methods=("MEAN",)), EMBED),
    "last": (PoolerSpec(hidden_size=H), EMBED),
    "all modes": (
        PoolerSpec(hidden_size=H, methods=("CLS", "MAX", "MEAN", "MEAN_SQRT_LEN", "WEIGHTEDMEAN", "LAST")),
        EMBED,
    ),
    "classes": (
        PoolerSpec(hidden_size=H, methods=("CLS",), head=CLASSES, activation="softmax", tasks=frozenset({"classify"})),
        CLASSIFY,
    ),
    "token classes": (
        PoolerSpec(hidden_size=H, head=CLASSES, activation="softmax", tasks=frozenset({"token_classify"})),
        TOKEN_CLASSIFY,
    ),
    "token vectors": (PoolerSpec(hidden_size=H), TOKEN_EMBED),
    "splade": (
        PoolerSpec(
            hidden_size=H,
            methods=("MAX",),
            token_head=PoolingHeadSpec(steps=(DenseSpec(weight="v", in_features=H, out_features=100),)),
            head=PoolingHeadSpec(steps=(ActivationSpec(activation="log1p_relu"),)),
            normalize=False,
        ),
        EMBED,
    ),
    "splade sum": (
        PoolerSpec(
            hidden_size=H,
            methods=("SUM",),
            token_head=PoolingHeadSpec(
                steps=(DenseSpec(weight="v", in_features=H, out_features=100), ActivationSpec(activation="log1p_relu"))
            ),
            normalize=False,
        ),
        EMBED,
    ),
}


@pytest.fixture(params=["installed kernels", "torch alone"])
def backends(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the kernels that are here, and as if there were none."""
    if request.param == "installed kernels":
        yield
        return
    kernels = [
        dataclasses.replace(backend, unavailable="not here")
        for op in op_table().ops
        for backend in op_table().backends(op)
        if backend.name == "cpu"
    ]
    with replaced_backends(kernels):
        yield


@pytest.mark.usefixtures("backends")
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_in_any_batch_order_and_chunking(name: str, hidden: Tensor, token_ids: Tensor) -> None:
    spec, params = CASES[name]
    pooler = Pooler(spec, weights_of(spec))
    whole = pooler.pool(hidden, LENS, [params] * len(LENS), token_ids)
    texts, ids = hidden.split(LENS), token_ids.split(LENS)
    for text, some_ids, result in zip(texts, ids, whole, strict=True):
        (alone,) = pooler.pool(text, [len(text)], [params], some_ids)
        assert torch.equal(alone, result)
    backwards = pooler.pool(torch.cat(texts[::-1]), LENS[::-1], [params] * len(LENS), torch.cat(ids[::-1]))
    assert all(map(torch.equal, backwards[::-1], whole))
    for size in (1, 50, 64):
        assert all(map(torch.equal, chunked(pooler, hidden, token_ids, [params] * len(LENS), size), whole)), size


def test_embeddings_are_pooled_cut_and_normalized(hidden: Tensor, token_ids: Tensor) -> None:
    pooler = Pooler(PoolerSpec(hidden_size=H, methods=("CLS", "MEAN"), dimensions=()))
    params = [EMBED, PoolingParams(dimensions=5), PoolingParams(use_activation=False), EMBED,
              PoolingParams(dimensions=5, use_activation=False)]  # fmt: skip
    results = pooler.pool(hidden, LENS, params, token_ids)
    for text, each, result in zip(hidden.split(LENS), params, results, strict=True):
        expected = torch.cat([text[0], text.mean(0)])[: each.dimensions]
        if each.use_activation is None:
            expected = F.normalize(expected, dim=0)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_logits_are_scaled_and_activated(hidden: Tensor, token_ids: Tensor) -> None:
    spec = PoolerSpec(
        hidden_size=H, methods=("CLS",), head=CLASSES, activation="softmax", logit_mean=0.5, logit_sigma=2.0,
        tasks=frozenset({"classify", "token_classify"}),
    )  # fmt: skip
    weights = weights_of(spec)
    pooler = Pooler(spec, weights)
    unscaled = PoolingParams(task="classify", use_activation=False)
    params = [CLASSIFY, unscaled, TOKEN_CLASSIFY, CLASSIFY, CLASSIFY]
    results = pooler.pool(hidden, LENS, params, token_ids)

    def logits(x: Tensor) -> Tensor:
        inner = torch.tanh(F.linear(x, weights["d.w"], weights["d.b"]))
        return (F.linear(inner, weights["c.w"], weights["c.b"]) - 0.5) / 2

    texts = hidden.split(LENS)
    torch.testing.assert_close(results[0], logits(texts[0][0]).softmax(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[1], logits(texts[1][0]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[2], logits(texts[2]).softmax(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[4], logits(texts[4][0]).softmax(-1), rtol=1e-5, atol=1e-6)
    raw = Pooler(PoolerSpec(hidden_size=H, methods=("CLS",), head=CLASSES, activation="softmax", use_activation=False,
                            tasks=frozenset({"classify"})), weights)  # fmt: skip
    active, plain = raw.pool(hidden[:4], [3, 1], [PoolingParams(use_activation=True), CLASSIFY], token_ids[:4])
    assert float(active.sum()) == pytest.approx(1.0)
    assert float(plain.sum()) != pytest.approx(1.0)


def test_step_pooling_keeps_tagged_tokens_and_columns(hidden: Tensor, token_ids: Tensor) -> None:
    spec = PoolerSpec(
        hidden_size=H, head=CLASSES, activation="softmax", token_method="STEP", step_tag_id=4,
        returned_token_ids=(2, 0), tasks=frozenset({"token_classify"}),
    )  # fmt: skip
    weights = weights_of(spec)
    pooler = Pooler(spec, weights)
    own, other = pooler.pool(
        hidden[:69], [65, 4], [TOKEN_CLASSIFY, PoolingParams(step_tag_id=1, returned_token_ids=(3,))], token_ids[:69]
    )
    inner = torch.tanh(F.linear(hidden, weights["d.w"], weights["d.b"]))
    logits = F.linear(inner, weights["c.w"], weights["c.b"])
    expected = logits[:65][token_ids[:65] == 4][:, [2, 0]].softmax(-1)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    assert own.shape == (6, 2)
    assert other.shape == (1, 1)  # of ids 10, 0, 1, 2


def test_tasks_per_token_may_have_heads_of_their_own(hidden: Tensor, token_ids: Tensor) -> None:
    """As BGE-M3: a dense vector of the first token, a weight and a vector of the others."""
    sparse = PoolingHeadSpec(
        steps=(DenseSpec(weight="s.w", bias="s.b", in_features=H, out_features=1, activation="relu"),)
    )
    colbert = PoolingHeadSpec(steps=(DenseSpec(weight="k.w", bias="k.b", in_features=H, out_features=6),))
    spec = PoolerSpec(
        hidden_size=H,
        methods=("CLS",),
        tasks=frozenset({"embed", "token_embed", "token_classify"}),
        token_tasks={
            "token_classify": TokenTaskSpec(head=sparse, skip_token_ids=frozenset({0, 10})),
            "token_embed": TokenTaskSpec(head=colbert, normalize=True, skip_token_ids=frozenset({0})),
        },
    )
    weights = weights_of(spec)
    pooler = Pooler(spec, weights)
    text, ids = hidden[:22], token_ids[:22]
    params = [EMBED, TOKEN_CLASSIFY, TOKEN_EMBED, PoolingParams(task="token_embed", use_activation=False)]
    dense, sparse_weights, vectors, raw = pooler.pool(text.repeat(4, 1), [22] * 4, params, ids.repeat(4))
    torch.testing.assert_close(dense, F.normalize(text[0], dim=0))
    kept = text[(ids != 0) & (ids != 10)]
    torch.testing.assert_close(sparse_weights, F.linear(kept, weights["s.w"], weights["s.b"]).relu())
    expected = F.linear(text[ids != 0], weights["k.w"], weights["k.b"])
    torch.testing.assert_close(raw, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(vectors, F.normalize(expected, dim=-1), rtol=1e-5, atol=1e-6)
    other = PoolingParams(task="token_embed", use_activation=False, skip_token_ids=(3, 10))
    (result,) = pooler.pool(text, [22], [other], ids)
    kept = F.linear(text[(ids != 3) & (ids != 10)], weights["k.w"], weights["k.b"])
    torch.testing.assert_close(result, kept, rtol=1e-5, atol=1e-5)


def test_splade_is_the_largest_weight_of_each_word(hidden: Tensor, token_ids: Tensor) -> None:
    for name in ("splade", "splade sum"):
        spec, params = CASES[name]
        weights = weights_of(spec)
        results = Pooler(spec, weights).pool(hidden, LENS, [params] * len(LENS), token_ids)
        for text, result in zip(hidden.split(LENS), results, strict=True):
            words = torch.log1p((text @ weights["v"].T).relu())
            expected = words.amax(0) if name == "splade" else words.sum(0)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        params = PoolingParams(task="token_embed")
        (words,) = Pooler(spec, weights).pool(hidden[4:69], [65], [params], token_ids[4:69])
        torch.testing.assert_close(words, torch.log1p((hidden[4:69] @ weights["v"].T).relu()), rtol=1e-5, atol=1e-5)


def test_the_prompt_is_left_out_where_the_checkpoint_says_so(hidden: Tensor, token_ids: Tensor) -> None:
    params = [PoolingParams(use_activation=False, prompt_length=length) for length in (1, 0, 60)]
    spec = PoolerSpec(hidden_size=H, methods=("MEAN",), include_prompt=False)
    results = Pooler(spec).pool(hidden[:69], LENS[:3], params, token_ids[:69])
    for text, each, result in zip(hidden.split(LENS), params, results, strict=False):
        torch.testing.assert_close(result, text[each.prompt_length :].mean(0), rtol=1e-5, atol=1e-6)
    included = Pooler(PoolerSpec(hidden_size=H, methods=("MEAN",)))
    (result,) = included.pool(hidden[:3], [3], params[:1], token_ids[:3])
    torch.testing.assert_close(result, hidden[:3].mean(0), rtol=1e-5, atol=1e-6)
    assert torch.equal(
        chunked(Pooler(spec), hidden, token_ids, [params[0]] * len(LENS), 1)[2],
        Pooler(spec).pool(hidden[4:69], [65], params[:1], token_ids[4:69])[0],
    )


def test_a_plugin_gets_the_hidden_states(hidden: Tensor, token_ids: Tensor) -> None:
    pooler = Pooler(CASES["classes"][0], weights_of(CASES["classes"][0]))
    raw, classes = pooler.pool(hidden[:4].bfloat16(), [3, 1], [PoolingParams(task="plugin"), CLASSIFY], token_ids[:4])
    assert torch.equal(raw, hidden[:3].bfloat16().float())
    assert classes.shape == (4,)


def test_only_the_last_token_does_with_a_cached_prefix() -> None:
    last = Pooler(PoolerSpec(hidden_size=H))
    assert last.reads_prefix_cache(EMBED)
    assert not last.reads_prefix_cache(TOKEN_EMBED)
    assert not Pooler(PoolerSpec(hidden_size=H, methods=("MEAN",))).reads_prefix_cache(EMBED)
    assert not Pooler(PoolerSpec(hidden_size=H, methods=("CLS", "LAST"))).reads_prefix_cache(EMBED)


@pytest.mark.parametrize(
    ("spec", "params", "param", "message"),
    [
        (PoolerSpec(hidden_size=H), CLASSIFY, "task", "no task 'classify'; it has embed, token_embed"),
        (PoolerSpec(hidden_size=H, tasks=frozenset()), PoolingParams(), "task", "pools nothing"),
        (PoolerSpec(hidden_size=H), PoolingParams(dimensions=8), "dimensions", "cannot be chosen"),
        (
            PoolerSpec(hidden_size=H, dimensions=(16, 8)),
            PoolingParams(dimensions=4),
            "dimensions",
            "one of 16, 8, got 4",
        ),
        (PoolerSpec(hidden_size=H, dimensions=()), PoolingParams(dimensions=33), "dimensions", "at most 32, got 33"),
        (PoolerSpec(hidden_size=H), PoolingParams(step_tag_id=1), "step_tag_id", "method STEP"),
        (
            PoolerSpec(hidden_size=H, token_method="STEP"),
            PoolingParams(task="embed", returned_token_ids=(1,)),
            "returned_token_ids",
            "tasks per token",
        ),
    ],
)
def test_what_a_pooler_cannot_do_is_refused(spec: PoolerSpec, params: PoolingParams, param: str, message: str) -> None:
    for refuse in (spec.resolve, Pooler(spec).begin, Pooler(spec).reads_prefix_cache):
        with pytest.raises(RequestError, match=message) as error:
            refuse(params)
        assert error.value.param == param


def test_a_request_without_a_task_gets_the_models() -> None:
    orders = itertools.accumulate(
        ["token_embed", "score", "classify", "token_classify", "embed"], lambda a, b: f"{a} {b}"
    )
    for tasks in orders:
        spec = PoolerSpec(hidden_size=H, tasks=frozenset(tasks.split()))  # type: ignore[arg-type]
        assert spec.resolve(PoolingParams()).task == tasks.split()[-1]


def test_dimensions_of_the_server_hold_where_the_request_names_none(hidden: Tensor, token_ids: Tensor) -> None:
    spec = PoolerSpec(hidden_size=H, dimensions=(), default_dimensions=6, tasks=frozenset({"embed", "classify"}))
    results = Pooler(spec).pool(hidden[:69], LENS[:3], [EMBED, PoolingParams(dimensions=9), CLASSIFY], token_ids[:69])
    assert [len(result) for result in results] == [6, 9, H]


MIXED = (
    PoolerSpec(
        hidden_size=H,
        methods=("MEAN",),
        head=CLASSES,
        activation="sigmoid",
        dimensions=(),
        tasks=frozenset({"embed", "classify", "token_embed", "token_classify"}),
        include_prompt=False,
    ),
    [
        PoolingParams(task="token_embed", prompt_length=1),
        PoolingParams(task="classify"),
        PoolingParams(task="embed", dimensions=2, prompt_length=3),
        PoolingParams(task="token_classify", skip_token_ids=(4, 7)),
        PoolingParams(task="embed", use_activation=False),
    ],
)
"""A pooler with all tasks, and what each text of `LENS` is asked for."""


def test_texts_of_different_tasks_stand_side_by_side(hidden: Tensor, token_ids: Tensor) -> None:
    spec, params = MIXED
    pooler = Pooler(spec, weights_of(spec))
    results = pooler.pool(hidden, LENS, params, token_ids)
    texts = zip(hidden.split(LENS), token_ids.split(LENS), params, results, strict=True)
    for text, ids, own, result in texts:
        assert torch.equal(pooler.pool(text, [len(text)], [own], ids)[0], result)
    for size in (2, 64):
        assert all(map(torch.equal, chunked(pooler, hidden, token_ids, params, size), results))
    assert [tuple(result.shape) for result in results] == [(2, 4), (4,), (2,), (106, 4), (4,)]


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "tanh", "log1p_relu", "silu", "softmax"])
@pytest.mark.parametrize("apart", [False, True])
def test_the_largest_of_activated_numbers(
    activation: Activation, apart: bool, hidden: Tensor, token_ids: Tensor
) -> None:
    """Functions that grow are computed once per text, behind the largest number; the others of each token."""
    dense = DenseSpec(weight="v", in_features=H, out_features=9, activation="identity" if apart else activation)
    steps = (dense, ActivationSpec(activation=activation)) if apart else (dense,)
    spec = PoolerSpec(hidden_size=H, methods=("MAX",), token_head=PoolingHeadSpec(steps=steps), normalize=False)
    weights = weights_of(spec)
    results = Pooler(spec, weights).pool(hidden, LENS, [EMBED] * len(LENS), token_ids)
    of_tokens = activate_with(torch.device("cpu"))(hidden @ weights["v"].T, activation)
    for result, each in zip(results, of_tokens.split(LENS), strict=True):
        torch.testing.assert_close(result, each.amax(0), rtol=1e-5, atol=1e-6)


def test_a_sum_of_residual_and_function_is_not_taken_apart(hidden: Tensor, token_ids: Tensor) -> None:
    dense = DenseSpec(weight="v", in_features=H, out_features=H, activation="relu", use_residual=True)
    head = PoolingHeadSpec(steps=(dense,))
    spec = PoolerSpec(hidden_size=H, methods=("MAX",), token_head=head, normalize=False)
    weights = weights_of(spec)
    results = Pooler(spec, weights).pool(hidden, LENS, [EMBED] * len(LENS), token_ids)
    of_tokens = hidden + torch.relu(hidden @ weights["v"].T)
    for result, each in zip(results, of_tokens.split(LENS), strict=True):
        torch.testing.assert_close(result, each.amax(0), rtol=1e-5, atol=1e-5)


def test_parts_of_a_text_have_vectors_of_their_own(hidden: Tensor, token_ids: Tensor) -> None:
    """Late chunking: the mean of each part's tokens, with the bits of a text of these tokens; whole, and in chunks."""
    pooler = Pooler(PoolerSpec(hidden_size=H, methods=("MEAN",), dimensions=()))
    edges = (1, 70, 71, 129)
    parts = [EMBED, EMBED, EMBED, dataclasses.replace(EMBED, late_chunk_edges=edges, dimensions=8), TOKEN_EMBED]
    found = pooler.pool(hidden, LENS, parts, token_ids)
    text = hidden.split(LENS)[3]
    means = torch.stack([text[start:end].mean(0)[:8] for start, end in itertools.pairwise(edges)])
    assert torch.allclose(found[3], F.normalize(means, dim=1), atol=1e-6)
    alone = pooler.pool(text[1:70], [69], [dataclasses.replace(EMBED, dimensions=8)], torch.zeros(69, dtype=torch.long))
    assert torch.equal(found[3][0], alone[0])
    for size in (1, 50):
        assert all(map(torch.equal, found, chunked(pooler, hidden, token_ids, parts, size)))


@pytest.mark.parametrize("spec", [
    PoolerSpec(hidden_size=H), PoolerSpec(hidden_size=H, methods=("MEAN", "MAX")),
    PoolerSpec(hidden_size=H, methods=("MEAN",), embeds_in_chunks=True),
])  # fmt: skip
def test_parts_need_a_mean_of_tokens(spec: PoolerSpec) -> None:
    with pytest.raises(RequestError, match="late_chunking takes a model that embeds by the mean"):
        spec.resolve(dataclasses.replace(EMBED, late_chunk_edges=(0, 1)))
    for wrong in ((0,), (1, 1), (-1, 2)):
        with pytest.raises(RequestError, match="late_chunk_edges must"):
            PoolingParams(late_chunk_edges=wrong)
