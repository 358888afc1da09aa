"""`quire bench peers --task speech`: real engines with the real tiny.en, the files that peers get, recordings."""

from __future__ import annotations

import json
import struct
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from quire_bench.peer_process import PeerProcess, engine_settings
from quire_bench.peers import PROGRAMS, Engine
from quire_bench.speech_files import SPEECH_FORMATS, write_speech_files
from quire_bench.speech_situations import SpeechSituation, parse_speech_situations
from quire_bench.spoken import RATE, Speech, write_wav
from quire_bench.workload import RecordingRequest
from quire_interfaces import CheckpointError, ConfigError
from quire_models.checkpoint_files import open_checkpoint
from quire_models.config import ModelConfig
from quire_models.hub import resolve_model
from quire_testkit.real_checkpoints import WHISPER_TINY_EN, real_checkpoint
from quire_testkit.tokenizers import write_tokenizer

FASTER_WHISPER = """
import json, os
__version__ = "0.0-stand-in"
log = open(os.environ["STAND_IN_LOG"], "a")

class Segment:
    text = " hello"

class WhisperModel:
    def __init__(self, folder, **values):
        print(json.dumps([folder, values]), file=log, flush=True)

    def transcribe(self, samples, **values):
        print(json.dumps([len(samples), str(samples.dtype), float(abs(samples).max()), values]), file=log, flush=True)
        return iter([Segment(), Segment()]), None
"""


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    folder = tmp_path / "recordings"
    folder.mkdir()
    noise = np.random.default_rng(0)
    for number in range(2):
        write_wav(folder / f"{number}.wav", (0.1 * noise.standard_normal(3 * RATE)).astype(np.float32))
    return folder


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WhisperForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("whisper")
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=300, d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=48, num_mel_bins=16, max_source_positions=100,
        max_target_positions=64, decoder_start_token_id=5, eos_token_id=290, bos_token_id=2, pad_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder, vocab_size=300)
    return folder, model


def test_beside_transformers(
    recordings: Path, quire: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = real_checkpoint(WHISPER_TINY_EN), tmp_path / "figures.json"
    arguments = ("--task", "speech", "--situations", "first-token,file-2,memory", "--repeats", 1, "--num-threads", 1)
    arguments += ("--dtype", "float32", "--output-len", 8, "--recordings", recordings, "--json", file)
    assert quire("bench", "peers", model, *arguments, "--peers", "transformers") == 0
    figures = json.loads(file.read_text())["situations"]
    assert set(figures) == {"first-token", "file-2", "file-2-cpu", "memory"}
    for rows in figures.values():
        assert all(rows[engine]["rounds"][0] > 0 for engine in ("quire", "transformers"))
    assert "a recording of 2 s, processor time" in capsys.readouterr().out


def test_wrong_arguments_are_told(
    recordings: Path, tiny_model: Path, quire: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("bench", "peers", tiny_model, "--task", "speech", "--peers", "")
    with pytest.raises(CheckpointError, match="no Whisper"):
        quire(*command, "--recordings", recordings)
    with pytest.raises(ConfigError, match=r"file-N, files-N, memory, got 'decode'"):
        quire(*command, "--recordings", recordings, "--situations", "decode")
    with pytest.raises(ConfigError, match="among int8, w8a8, got 'int4'"):
        quire(*command, "--recordings", recordings, "--weight-formats", "int4")
    with pytest.raises(ConfigError, match="there are no WAV files"):
        quire(*command, "--recordings", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install it"):
        quire(*command)


def test_recordings_are_as_long_as_asked_and_never_alike(recordings: Path, tmp_path: Path) -> None:
    speech = Speech(tmp_path, recordings)
    first, again, other = speech.recording(7, 1), Speech(tmp_path, recordings).recording(7, 1), speech.recording(7, 2)
    assert first == again
    data = []
    for path in (first, other):
        with wave.open(str(path)) as file:
            assert (file.getframerate(), file.getnframes()) == (RATE, 7 * RATE)
            data.append(file.readframes(7 * RATE))
    assert data[0] != data[1]
    with wave.open(str(tmp_path / "x.wav"), "wb") as file:
        file.setparams((2, 2, RATE, 0, "NONE", ""))
    with pytest.raises(ConfigError, match="one channel"):
        Speech(tmp_path, tmp_path)


def test_figures_of_a_situation(recordings: Path, tmp_path: Path) -> None:
    asked: list[list[RecordingRequest]] = []

    def serve(requests: Any) -> dict[str, Any]:
        asked.append(list(requests))
        return {"seconds": 4.0, "cpu_s": 6.0}

    one, of_one, eight, _ = parse_speech_situations("file-10,files-8", Speech(tmp_path, recordings), 50)
    assert isinstance(one, SpeechSituation)
    assert isinstance(eight, SpeechSituation)
    assert one.measure(serve, 0) == {"file-10": 0.4, "file-10-cpu": 0.6}
    assert eight.measure(serve, 0) == {"files-8": 60.0, "files-8-cpu": 6 / 240}
    assert not of_one.sends_requests
    assert [len(each) for each in asked] == [1, 1, 8, 8]
    assert len({request.path for requests in asked for request in requests}) == 18  # none is heard twice


def test_peers_get_the_same_numbers(whisper: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path) -> None:
    folder, model = whisper
    write_speech_files(folder, tmp_path)
    expected = {name: each for name, each in model.state_dict().items() if name != "proj_out.weight"}
    again = WhisperForConditionalGeneration.from_pretrained(tmp_path / SPEECH_FORMATS["transformers"])
    assert all(torch.equal(again.state_dict()[name], each) for name, each in expected.items())
    stored = tmp_path / SPEECH_FORMATS["faster-whisper"]
    assert len(json.loads((stored / "vocabulary.json").read_text())) == 300
    tokenizer = json.loads((stored / "tokenizer.json").read_text())
    names = ("<|endoftext|>", "<|startoftranscript|>")
    tokenizer["added_tokens"] = [{"id": number, "content": name} for number, name in enumerate(names)]
    (stored / "tokenizer.json").write_text(json.dumps(tokenizer))  # what a folder of CTranslate2 has to have
    made = resolve_model(stored)
    config = ModelConfig.from_path(made)
    assert (config.num_mel_bins, config.hidden_size, config.vocab_size) == (16, 32, 300)
    found = dict(open_checkpoint(made).tensors())
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_the_file_of_whisper_cpp(whisper: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path) -> None:
    """Read as whisper.cpp's loader does: sizes, filters, tokens, tensors to the end."""
    folder, model = whisper
    write_speech_files(folder, tmp_path)
    data, place = (tmp_path / SPEECH_FORMATS["whisper.cpp"]).read_bytes(), 0

    def numbers(count: int) -> tuple[int, ...]:
        nonlocal place
        place += 4 * count
        return struct.unpack_from(f"<{count}i", data, place - 4 * count)

    def bytes_(count: int) -> bytes:
        nonlocal place
        place += count
        return data[place - count : place]

    assert numbers(12) == (0x67676D6C, 300, 100, 32, 2, 2, 64, 32, 4, 1, 16, 1)
    assert numbers(2) == (16, 201)
    bytes_(4 * 16 * 201)
    (count,) = numbers(1)
    assert count == 290
    tokens = [bytes_(numbers(1)[0]) for _ in range(count)]
    assert b"A" in tokens
    tensors = {}
    while place < len(data):
        rank, length, kind = numbers(3)
        shape = numbers(rank)[::-1]
        name = bytes_(length).decode()
        dtype = np.dtype("<f2" if kind else "<f4")
        tensors[name] = np.frombuffer(bytes_(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    state = model.state_dict()
    assert len(tensors) == len(state) - 1
    assert tensors["encoder.conv1.bias"].shape == (32, 1)
    for name, own in (
        ("decoder.blocks.0.cross_attn.value.weight", "model.decoder.layers.0.encoder_attn.v_proj.weight"),
        ("encoder.blocks.1.mlp.2.bias", "model.encoder.layers.1.fc2.bias"),
        ("encoder.positional_embedding", "model.encoder.embed_positions.weight"),
        ("encoder.conv2.weight", "model.encoder.conv2.weight"),
    ):
        expected = state[own].numpy()
        assert np.array_equal(tensors[name], expected.astype(tensors[name].dtype))


def test_faster_whisper(tmp_path: Path, recordings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faster_whisper.py").write_text(FASTER_WHISPER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    settings = engine_settings(Path("x"), dtype="float32", num_threads=2, max_model_len=64, max_num_seqs=8)
    command = (sys.executable, str(PROGRAMS / "run_faster_whisper.py"))
    engine = Engine(name="faster-whisper", command=command, file="/models/ct2")
    requests = [RecordingRequest(path=recordings / f"{number}.wav", output_len=20) for number in range(2)]
    with PeerProcess(engine, {**settings, "quantization": "w8a8"}, timeout_s=60) as peer:
        reply = peer.serve(requests)
    assert reply["text_lens"] == [12, 12]
    assert 0 <= reply["cpu_s"] < 60
    (folder, made), first, *both = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert (folder, made) == ("/models/ct2", {"device": "cpu", "compute_type": "int8", "cpu_threads": 2})
    assert first[0] == RATE
    assert [each[:2] for each in both] == [[3 * RATE, "float32"]] * 2
    assert all(each[2] < 1 and each[3]["max_new_tokens"] == 20 and each[3]["temperature"] == 0 for each in both)
