"""Poolers of checkpoints: what the files of sentence-transformers, pylate and BGE-M3 say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire_interfaces import CheckpointError, PoolingParams
from quire_pooling import (
    ActivationSpec,
    DenseSpec,
    NormalizeSpec,
    Pooler,
    PoolerSpec,
    PoolingHeadSpec,
    load_pooler_weights,
    read_pooler,
)
from quire_pooling.checkpoint import network_folder

H = 12
OLD = "sentence_transformers.models"


def write(folder: Path, *modules: tuple[str, dict[str, Any] | None], **settings: Any) -> Path:
    """A checkpoint's files: classes of modules behind the network with their configurations, and settings."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{OLD}.Transformer"}]
    for number, (class_name, config) in enumerate(modules, 1):
        path = f"{number}_{class_name.rpartition('.')[2]}"
        entries.append({"idx": number, "name": str(number), "path": path, "type": class_name})
        (folder / path).mkdir()
        if config is not None:
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(entries))
    if settings:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def read(folder: Path, config: dict[str, Any] | None = None, **facts: Any) -> PoolerSpec:
    return read_pooler(folder, config or {}, hidden_size=H, **{"is_encoder": True, **facts})


MEAN = (f"{OLD}.Pooling", {"word_embedding_dimension": H, "pooling_mode_mean_tokens": True})
NORMALIZE = (f"{OLD}.Normalize", None)


def dense(in_features: int, out_features: int, **config: Any) -> tuple[str, dict[str, Any]]:
    return f"{OLD}.Dense", {"in_features": in_features, "out_features": out_features, **config}


@pytest.mark.parametrize(
    ("config", "methods"),
    [
        ({"word_embedding_dimension": H, "pooling_mode_cls_token": True}, ("CLS",)),
        ({"word_embedding_dimension": H, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, ("LAST",)),
        ({"word_embedding_dimension": H, "pooling_mode_max_tokens": True}, ("MAX",)),
        ({"word_embedding_dimension": H, "pooling_mode_mean_sqrt_len_tokens": True}, ("MEAN_SQRT_LEN",)),
        ({"word_embedding_dimension": H, "pooling_mode_weightedmean_tokens": True}, ("WEIGHTEDMEAN",)),
        (
            {"word_embedding_dimension": H, "pooling_mode_lasttoken": True, "pooling_mode_cls_token": True,
             "pooling_mode_mean_tokens": True},
            ("CLS", "MEAN", "LAST"),
        ),
        ({"word_embedding_dimension": H, "pooling_mode_mean_tokens": False}, ("MEAN",)),
        ({"embedding_dimension": H, "pooling_mode": "lasttoken"}, ("LAST",)),
        ({"embedding_dimension": H, "pooling_mode": ["max", "cls"]}, ("MAX", "CLS")),
        ({}, ("MEAN",)),
    ],
)  # fmt: skip
def test_pooling_modes_of_old_and_new_files(tmp_path: Path, config: dict[str, Any], methods: tuple[str, ...]) -> None:
    spec = read(write(tmp_path, (f"{OLD}.Pooling", config)))
    assert spec.methods == methods
    assert (spec.normalize, spec.include_prompt, spec.tasks) == (False, True, {"embed", "token_embed"})
    assert spec.embedding_size == H * len(methods)


def test_a_chain_of_modules_in_their_order(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        ("sentence_transformers.sentence_transformer.modules.pooling.Pooling",
         {"embedding_dimension": H, "pooling_mode": ["cls", "mean"], "include_prompt": False}),
        dense(2 * H, 8, bias=False, activation_function="torch.nn.modules.linear.Identity"),
        (f"{OLD}.Normalize", None),
        dense(8, 6),
        (f"{OLD}.LayerNorm", {"dimension": 6}),
        (f"{OLD}.Dropout", {"dropout": 0.1}),
        dense(6, 6, use_residual=True, activation_function="torch.nn.modules.activation.GELU"),
        NORMALIZE,
    )  # fmt: skip
    spec = read(folder)
    assert (spec.methods, spec.include_prompt, spec.normalize) == (("CLS", "MEAN"), False, True)
    assert [type(step).__name__ for step in spec.head.steps] == [
        "DenseSpec", "NormalizeSpec", "DenseSpec", "LayerNormSpec", "DenseSpec",
    ]  # fmt: skip
    assert spec.head.steps[0] == DenseSpec(weight="2_Dense/linear.weight", in_features=2 * H, out_features=8)
    assert spec.head.steps[2] == DenseSpec(
        weight="4_Dense/linear.weight", bias="4_Dense/linear.bias", in_features=8, out_features=6, activation="tanh"
    )
    assert spec.head.steps[4].activation == "gelu_erf"
    shapes = spec.shapes()
    generator = torch.Generator().manual_seed(0)
    expected: dict[str, Tensor] = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for number in (2, 4, 7):
        tensors = {name.partition("/")[2]: tensor for name, tensor in expected.items() if name.startswith(f"{number}_")}
        save_file(tensors, tmp_path / f"{number}_Dense" / "model.safetensors")
    norm = {name.partition("/")[2]: tensor for name, tensor in expected.items() if name.startswith("5_")}
    torch.save(norm, tmp_path / "5_LayerNorm" / "pytorch_model.bin")
    weights = load_pooler_weights(spec, folder)
    assert weights.keys() == shapes.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in shapes)
    assert len(Pooler(spec, weights).spec.head.steps) == 5


def test_texts_are_prepared_as_the_files_say(tmp_path: Path) -> None:
    folder = write(
        tmp_path, MEAN, NORMALIZE,
        prompts={"query": "query: ", "document": "passage: "}, default_prompt_name="query", similarity_fn_name="dot",
    )  # fmt: skip
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": true}')
    spec = read(folder)
    assert spec.prompts == {"query": "query: ", "document": "passage: "}
    assert (spec.default_prompt_name, spec.similarity, spec.max_seq_length, spec.do_lower_case) == (
        "query", "dot", 256, True,
    )  # fmt: skip
    plain = read(write_in(tmp_path / "plain", MEAN))
    assert (plain.prompts, plain.default_prompt_name, plain.similarity) == ({}, None, None)
    assert (plain.max_seq_length, plain.do_lower_case) == (None, False)
    for length, expected in ((512, 512), (10**30, None), ("512", None), (True, None)):
        (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
        assert read(tmp_path / "plain").max_seq_length == expected
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    assert read(folder).max_seq_length == 256


def write_in(folder: Path, *modules: tuple[str, dict[str, Any] | None], **settings: Any) -> Path:
    folder.mkdir()
    return write(folder, *modules, **settings)


def test_the_network_may_be_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = write(tmp_path, MEAN)
    assert network_folder(folder) == folder
    entries = json.loads((folder / "modules.json").read_text())
    entries[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "0_Transformer").mkdir()
    (folder / "0_Transformer" / "sentence_roberta_config.json").write_text('{"max_seq_length": 128}')
    assert network_folder(folder) == folder / "0_Transformer"
    assert read(folder).max_seq_length == 128
    (tmp_path / "bare").mkdir()
    assert network_folder(tmp_path / "bare") == tmp_path / "bare"


def test_matryoshka_dimensions(tmp_path: Path) -> None:
    folder = write(tmp_path, MEAN)
    assert read(folder).dimensions is None
    assert read(folder, {"is_matryoshka": True}).dimensions == ()
    assert read(folder, {"is_matryoshka": True, "matryoshka_dimensions": [8, 4]}).dimensions == (8, 4)
    with pytest.raises(CheckpointError, match="matryoshka_dimensions must be numbers above 0"):
        read(folder, {"matryoshka_dimensions": [0]})


def test_a_body_alone_is_pooled_by_its_kind_and_says_so(tmp_path: Path) -> None:
    encoder, decoder = read(tmp_path), read(tmp_path, is_encoder=False)
    assert (encoder.methods, encoder.normalize) == (("MEAN",), True)
    assert (decoder.methods, decoder.normalize) == (("LAST",), True)
    assert "the mean of all tokens" in encoder.notes[0]
    assert "the last token" in decoder.notes[0]
    assert read(write(tmp_path, MEAN)).notes == ()


CLASSIFIER = PoolerSpec(
    hidden_size=H,
    methods=("CLS",),
    head=PoolingHeadSpec(steps=(DenseSpec(weight="classifier.weight", in_features=H, out_features=1),)),
    activation="sigmoid",
    tasks=frozenset({"classify", "score"}),
    labels=("relevant",),
)


def test_a_classifier_without_modules_is_the_networks(tmp_path: Path) -> None:
    assert read(tmp_path, network=CLASSIFIER) == CLASSIFIER


def test_a_cross_encoder_takes_its_activation_and_prompts_from_the_settings(tmp_path: Path) -> None:
    folder = write(
        tmp_path, model_type="CrossEncoder", activation_fn="torch.nn.modules.linear.Identity", prompts={"web": "Web: "}
    )
    spec = read(folder, network=CLASSIFIER)
    assert (spec.activation, spec.head, spec.prompts) == ("identity", CLASSIFIER.head, {"web": "Web: "})
    with pytest.raises(CheckpointError, match="nothing says how to pool"):
        read(folder)


def test_modules_go_before_the_head_of_the_networks_class(tmp_path: Path) -> None:
    """Many an embedding model's config.json says BertForMaskedLM, or a classifier's class."""
    spec = read(write(tmp_path, MEAN, NORMALIZE), network=CLASSIFIER)
    assert (spec.methods, spec.head, spec.tasks) == (("MEAN",), PoolingHeadSpec(), {"embed", "token_embed"})


def test_scores_by_a_dense_layer(tmp_path: Path) -> None:
    identity = "torch.nn.modules.linear.Identity"
    folder = write(
        tmp_path,
        MEAN,
        dense(H, 1, module_output_name="scores", activation_function=identity),
        model_type="CrossEncoder",
    )
    spec = read(folder)
    assert (spec.tasks, spec.activation, spec.labels) == ({"classify", "score"}, "sigmoid", ("LABEL_0",))
    classes = read(
        write_in(tmp_path / "3", MEAN, dense(H, 3, module_output_name="scores", activation_function=identity))
    )
    assert (classes.tasks, classes.activation) == ({"classify"}, "identity")


@pytest.mark.parametrize("false_token", [None, 2])
def test_scores_by_logits_of_tokens_read_rows_of_the_lm_head(tmp_path: Path, false_token: int | None) -> None:
    config = {"true_token_id": 5} | ({} if false_token is None else {"false_token_id": false_token})
    folder = write(tmp_path, ("sentence_transformers.cross_encoder.modules.logit_score.LogitScore", config))
    spec = read(folder, is_encoder=False, lm_head="model.embed_tokens.weight")
    assert (spec.methods, spec.tasks, spec.activation) == (("LAST",), {"classify", "score"}, "sigmoid")
    table = torch.randn(9, H).bfloat16()
    save_file({"other": torch.zeros(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"model.embed_tokens.weight": table}, folder / "model-00002-of-00002.safetensors")
    weights = load_pooler_weights(spec, folder)
    expected = table[5].float() - (0 if false_token is None else table[2].float())
    assert torch.equal(weights["model.embed_tokens.weight"], expected.unsqueeze(0))
    assert Pooler(spec, weights).spec.embedding_size == 1
    with pytest.raises(CheckpointError, match="the network has no LM head"):
        read(folder, is_encoder=False)
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight in a safetensors file"):
        load_pooler_weights(read(folder, lm_head="lm_head.weight"), folder)
    save_file({"model.embed_tokens.weight": table[:4]}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="has 4 rows, and token 5 is asked for"):
        load_pooler_weights(spec, folder)


MASKED_LM = PoolerSpec(
    hidden_size=H,
    methods=("MAX",),
    token_head=PoolingHeadSpec(
        steps=(DenseSpec(weight="decoder", in_features=H, out_features=50, activation="log1p_relu"),)
    ),
    normalize=False,
)


@pytest.mark.parametrize(
    ("config", "method", "activation"),
    [
        ({"pooling_strategy": "max"}, "MAX", "log1p_relu"),
        ({"pooling_strategy": "sum", "activation_function": "relu"}, "SUM", "log1p_relu"),
        ({"activation_function": "log1p_relu"}, "MAX", "log1p_log1p_relu"),
    ],
)
def test_splade(tmp_path: Path, config: dict[str, Any], method: str, activation: str) -> None:
    folder = write(tmp_path, ("sentence_transformers.sparse_encoder.models.SpladePooling", config))
    spec = read(folder, network=MASKED_LM)
    assert spec.methods == (method,)
    assert spec.token_head.steps == (
        DenseSpec(weight="decoder", in_features=H, out_features=50),
        ActivationSpec(activation=activation),  # type: ignore[arg-type]
    )
    assert (spec.normalize, spec.embedding_size) == (False, 50)
    with pytest.raises(CheckpointError, match="needs the head of a masked language model"):
        read(folder)


def test_colbert_of_pylate(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        ("pylate.models.Dense.Dense",
         {"in_features": H, "out_features": 4, "bias": False, "use_residual": True,
          "activation_function": "torch.nn.modules.linear.Identity"}),
        model_type="ColBERT", query_prefix="[Q] ", document_prefix="[D] ", query_length=39, document_length=300,
        attend_to_expansion_tokens=False, skiplist_words=["!", ","], do_query_expansion=True,
    )  # fmt: skip
    spec = read(folder)
    assert (spec.tasks, spec.normalize, spec.embedding_size) == ({"token_embed"}, True, 4)
    assert spec.head.steps[0].residual == "1_Dense/residual.weight"
    late = spec.late_interaction
    assert late is not None
    assert (late.query_prefix, late.document_prefix, late.query_length, late.document_length) == (
        "[Q] ",
        "[D] ",
        39,
        300,
    )
    assert (late.do_query_expansion, late.attend_to_expansion_tokens) == (True, False)
    assert late.skiplist_words == ("!", ",")
    assert late.expansion_token == ""
    assert spec.notes == ()
    for token in ("[MASK]", {"content": "[MASK]", "lstrip": True}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": token, "eos_token": "</s>"}))
        late = read(folder).late_interaction
        assert late is not None
        assert late.expansion_token == "[MASK]"
    plain = read(write_in(tmp_path / "plain", ("pylate.models.Dense.Dense", {"in_features": H, "out_features": 4})))
    assert plain.late_interaction is not None
    assert (plain.late_interaction.query_length, plain.late_interaction.document_length) == (32, 180)
    assert len(plain.late_interaction.skiplist_words) == 32


def test_multi_vectors_of_sentence_transformers(tmp_path: Path) -> None:
    modules = "sentence_transformers.multi_vector_encoder.modules"
    folder = write(
        tmp_path,
        ("sentence_transformers.base.modules.dense.Dense",
         {"in_features": H, "out_features": 4, "module_input_name": "token_embeddings",
          "activation_function": "torch.nn.modules.linear.Identity"}),
        ("sentence_transformers.base.modules.normalize.Normalize", {"module_input_name": "token_embeddings"}),
        (f"{modules}.multi_vector_mask.MultiVectorMask", {"skiplist_words": ["."]}),
        model_type="MultiVectorEncoder",
    )  # fmt: skip
    spec = read(folder)
    assert (spec.tasks, spec.normalize, spec.embedding_size) == ({"token_embed"}, True, 4)
    assert spec.late_interaction is not None
    assert spec.late_interaction.skiplist_words == (".",)


def test_bge_m3_has_three_tasks(tmp_path: Path) -> None:
    folder = write(
        tmp_path, (f"{OLD}.Pooling", {"word_embedding_dimension": H, "pooling_mode_cls_token": True}), NORMALIZE
    )
    config = {"bos_token_id": 0, "eos_token_id": 2}
    assert read(folder, config).tasks == {"embed", "token_embed"}
    sparse = {"weight": torch.randn(1, H).half(), "bias": torch.randn(1).half()}
    colbert = {"weight": torch.randn(H, H).half(), "bias": torch.randn(H).half()}
    torch.save(sparse, folder / "sparse_linear.pt")
    torch.save(colbert, folder / "colbert_linear.pt")
    spec = read(folder, config)
    assert (spec.tasks, spec.methods, spec.normalize) == ({"embed", "token_embed", "token_classify"}, ("CLS",), True)
    assert spec.token_tasks["token_classify"].skip_token_ids == {0, 2}
    assert spec.token_tasks["token_embed"].skip_token_ids == {0}
    weights = load_pooler_weights(spec, folder)
    assert torch.equal(weights["sparse_linear.pt/weight"], sparse["weight"])
    assert torch.equal(weights["colbert_linear.pt/bias"], colbert["bias"])
    assert Pooler(spec, weights).spec is spec


def refused(tmp_path: Path, message: str, *modules: tuple[str, dict[str, Any] | None], **settings: Any) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(write(tmp_path, *modules, **settings))


@pytest.mark.parametrize(
    ("message", "modules"),
    [
        (r"module sentence_transformers\.models\.CNN is not supported; supported: Dense", [(f"{OLD}.CNN", {})]),
        ("pools vectors of 13 numbers, and gets 12", [(f"{OLD}.Pooling", {"word_embedding_dimension": 13})]),
        ("pooling mode 'best' is unknown", [(f"{OLD}.Pooling", {"pooling_mode": "best"})]),
        ("two pooling modules", [MEAN, MEAN]),
        ("in_features is 13, and vectors have 12", [MEAN, dense(13, 4)]),
        ("out_features is missing", [MEAN, (f"{OLD}.Dense", {"in_features": H})]),
        ("activation 'torch.nn.ELU' is not supported", [MEAN, dense(H, 4, activation_function="torch.nn.ELU")]),
        ("activation 'os.system' is not supported", [MEAN, dense(H, 4, activation_function="os.system")]),
        ("the layer reads token_embeddings, and gets sentence_embedding",
         [MEAN, dense(H, 4, module_input_name="token_embeddings")]),
        ("the layer reads sentence_embedding, and gets token_embeddings", [dense(H, 4)]),
        ("module_output_name 'side' is not supported", [MEAN, dense(H, 4, module_output_name="side")]),
        ("dimension is 3, and vectors have 12", [MEAN, (f"{OLD}.LayerNorm", {"dimension": 3})]),
        ("a layer norm before a pooling module", [(f"{OLD}.LayerNorm", {"dimension": H})]),
        ("pooling 'mean' of 'relu' is not supported", [(f"{OLD}.SpladePooling", {"pooling_strategy": "mean"})]),
        ("skiplist_tasks 'query' is not supported", [(f"{OLD}.MultiVectorMask", {"skiplist_tasks": "query"})]),
    ],
)  # fmt: skip
def test_modules_that_are_not_understood_are_refused_by_name(
    tmp_path: Path, message: str, modules: list[tuple[str, dict[str, Any] | None]]
) -> None:
    refused(tmp_path, message, *modules)


def test_settings_that_are_not_understood_are_refused_by_name(tmp_path: Path) -> None:
    refused(tmp_path, "default_prompt_name 'q' is none of query", MEAN, prompts={"query": ""}, default_prompt_name="q")
    (tmp_path / "2").mkdir()
    refused(tmp_path / "2", "prompts must be texts", MEAN, prompts={"query": 1})


def test_a_modules_file_that_is_damaged_or_hostile_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, MEAN) / "modules.json"
    for text, message in (
        ("{", "cannot be read"),
        ("{}", "must hold a list"),
        ("[]", "the first module must be a Transformer, is nothing"),
        ('[{"type": "sentence_transformers.models.StaticEmbedding", "path": ""}]', "StaticEmbedding, which is not"),
        ('[{"type": "a.Transformer", "path": "../../etc"}]', "outside of the checkpoint"),
        ('[{"type": "a.Transformer", "path": "/etc"}]', "outside of the checkpoint"),
    ):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path)


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_files_of_tensors_are_refused_where_they_are_damaged_or_run_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = read(write(tmp_path, MEAN, dense(H, 4)))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_pooler_weights(spec, tmp_path)
    binary = tmp_path / "2_Dense" / "pytorch_model.bin"
    torch.save(Evil(), binary)
    with pytest.raises(CheckpointError, match="cannot read"):
        load_pooler_weights(spec, tmp_path)
    assert not Path("evil").exists()
    torch.save([1], binary)
    with pytest.raises(CheckpointError, match="does not hold names and tensors"):
        load_pooler_weights(spec, tmp_path)
    torch.save({"linear.weight": torch.zeros(4, H)}, binary)
    with pytest.raises(CheckpointError, match=r"no tensor linear\.bias"):
        load_pooler_weights(spec, tmp_path)
    (tmp_path / "2_Dense" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot read"):
        load_pooler_weights(spec, tmp_path)


def test_a_normalization_between_layers_is_computed(tmp_path: Path) -> None:
    head = PoolingHeadSpec(steps=(NormalizeSpec(), DenseSpec(weight="w", in_features=H, out_features=H)))
    spec = PoolerSpec(hidden_size=H, methods=("CLS",), head=head, normalize=False)
    x = torch.randn(1, H)
    (result,) = Pooler(spec, {"w": torch.eye(H)}).pool(x, [1], [PoolingParams()], torch.zeros(1))
    torch.testing.assert_close(result, torch.nn.functional.normalize(x[0], dim=0))


def test_the_task_whose_adapter_counts_is_told(tmp_path: Path) -> None:
    config = {"lora_adaptations": ["retrieval.query", "separation"]}
    free = read(tmp_path, config)
    assert "requests choose a task (retrieval.query, separation)" in free.notes[-1]
    assert (free.embedding_tasks, free.merged_task) == (("retrieval.query", "separation"), None)
    assert "for the task separation" in read(tmp_path, config | {"default_task": "separation"}).notes[-1]
    assert not any("task" in note for note in read(tmp_path).notes)
