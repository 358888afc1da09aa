"""`LLM("model.gguf")`: everything from one file, the tokenizer included."""

from __future__ import annotations

import io
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import load_file

from quire import LLM, SamplingParams
from quire_interfaces import CheckpointError
from quire_models import resolve_model
from quire_renderers import load_tokenizer
from quire_testkit.checkpoints import make_checkpoint
from quire_testkit.tokenizers import sample_text

TEXTS = (
    "Hello  world, it's 12345 o'clock!\n\n  She'll say \"naïve café\" – 東京 🙂\ttabs",
    " leading space",
    "",
    "<|im_start|>user\nHi<|im_end|>\nDON'T 3.14159 x_1\r\n",
    sample_text(60),
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_file(file: Path, folder: Path) -> None:
    """A checkpoint of family qwen3 as a GGUF file of float32."""
    config = json.loads((folder / "config.json").read_text())
    spec = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    tokens = dict(spec["model"]["vocab"])
    special = {token["content"]: token["id"] for token in spec["added_tokens"]}
    tokens |= special
    in_order = sorted(tokens, key=tokens.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(in_order)
    writer.add_token_types([3 if token in special else 1 for token in in_order])
    writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_chat_template(settings["chat_template"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_answers_as_the_folder_it_was_made_from(tmp_path: Path) -> None:
    folder, file = tmp_path / "checkpoint", tmp_path / "tiny.gguf"
    make_checkpoint(folder, like="qwen3", size="tiny", dtype="float32")
    write_file(file, folder)
    messages = [{"role": "user", "content": "Say something."}]
    answers = []
    tier = {"kv_disk_path": str(tmp_path / "tier"), "kv_disk_size": "50M"}  # which digests the checkpoint's files
    for model, settings in ((folder, {}), (file, {}), (file, tier)):
        with LLM(str(model), max_model_len=128, num_threads=1, **settings) as llm:
            outputs = llm.generate(list(TEXTS[:2]), GREEDY, use_tqdm=False)
            chat = llm.chat(messages, GREEDY, use_tqdm=False)
        answers.append([(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].text) for o in [*outputs, *chat]])
    assert answers[0] == answers[1] == answers[2]
    of_folder, of_file = load_tokenizer(folder), load_tokenizer(resolve_model(file))
    for text in TEXTS:
        assert of_file.encode(text) == of_folder.encode(text)
    assert of_file.eos_token_ids == (*of_folder.eos_token_ids, *of_folder.encode("<|endoftext|>"))


def vocabulary(file: Path, tokens: list[str], **more: object) -> Path:
    """A file that holds a vocabulary and the least of a network. Returns its folder."""
    writer = gguf.GGUFWriter(file, "llama")
    for add in ("embedding_length", "block_count", "feed_forward_length", "head_count", "context_length"):
        getattr(writer, f"add_{add}")(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(tokens)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return resolve_model(file)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabularies_encode_as_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([sample_text(20, seed) for seed in range(60)]), model_writer=model, model_type="bpe",
        vocab_size=420, byte_fallback=True, add_dummy_prefix=prefix, normalization_rule_name="identity",
        remove_extra_whitespaces=False, bos_id=1, eos_id=2, unk_id=0, minloglevel=2,
    )  # fmt: skip
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = oracle.vocab_size()
    kinds = [
        2 if oracle.is_unknown(i) else 3 if oracle.is_control(i) else 6 if oracle.is_byte(i) else 1 for i in range(size)
    ]
    folder = vocabulary(
        tmp_path / "x.gguf", [oracle.id_to_piece(i) for i in range(size)], tokenizer_model="llama", token_types=kinds,
        token_scores=[oracle.get_score(i) for i in range(size)], bos_token_id=1, eos_token_id=2,
        add_space_prefix=prefix,
    )  # fmt: skip
    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        wanted = oracle.encode(text)
        assert tokenizer.encode(text)[1:] == wanted
        assert tokenizer.encode(text)[:1] == [1]
        assert tokenizer.decode(wanted) == oracle.decode(wanted)


def test_tokenizers_that_are_not_read_leave_the_rest_usable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = vocabulary(tmp_path / "x.gguf", ["a"], tokenizer_model="gpt2", tokenizer_pre="martian")
    assert "pre-tokenizer 'martian'" in caplog.text
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(folder)
    with pytest.raises(CheckpointError, match="token_type has 2 entries for 1 tokens"):
        vocabulary(tmp_path / "y.gguf", ["a"], tokenizer_model="llama", token_types=[1, 1])
    with pytest.raises(CheckpointError, match=r"merges must be a list"):
        vocabulary(tmp_path / "z.gguf", ["a"], tokenizer_model="gpt2", tokenizer_pre="qwen2")
