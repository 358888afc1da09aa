"""The `quire` command: settings from flags, file and environment; reports without torch; errors that help."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from quire_interfaces import ConfigError
from quire_server import cli
from quire_server.command_line import Parser, settings_from
from quire_server.config import ServerConfig
from quire_testkit.checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("QUIRE_PORT", "QUIRE_API_KEY", "QUIRE_MAX_NUM_SEQS"):
        monkeypatch.delenv(name, raising=False)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        status = cli.main(list(arguments))
    except SystemExit as end:
        status = int(end.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def settings(*arguments: str) -> dict:
    parser = Parser("quire serve")
    parser.add_argument("MODEL", nargs="?")
    built, _, _ = settings_from(parser, list(arguments), cli.server_sections())
    return built


def test_flags_of_a_vllm_command_line():
    built = settings(
        "some/model", "--host", "0.0.0.0", "--port", "9000", "--served-model-name", "a", "b", "--api-key", "k1",
        "--api-key", "k2", "--dtype", "bfloat16", "--max-model-len", "4k", "--max-num-seqs", "32",
        "--max-num-batched-tokens", "4096", "--block-size", "32", "--no-enable-prefix-caching",
        "--prefix-caching-hash-algo", "xxhash", "--kv-cache-memory-bytes", "2Gi", "--enable-chunked-prefill",
        "--scheduling-policy", "priority", "--max-logprobs", "5", "--no-async-scheduling", "--root-path", "/x",
        "--allowed-origins", "*", "--uvicorn-log-level", "info", "--metrics-prefix", "vllm",
        "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}',
    )  # fmt: skip
    server, model = built["server"], built["model"]
    assert isinstance(server, ServerConfig)
    assert (server.host, server.port, server.root_path) == ("0.0.0.0", 9000, "/x")
    assert server.served_model_name == ("a", "b")
    assert server.api_key == ("k1", "k2")
    assert (model.model, model.max_model_len, model.kv_cache_memory_bytes) == ("some/model", 4000, 2 << 30)
    assert built["kv_cache"].enable_prefix_caching is False
    assert built["scheduler"].policy == "priority"
    assert built["speculative"].num_speculative_tokens == 3


def test_vllms_spellings(tmp_path):
    plain = settings(
        "--max-model-len", "64", "--no-access-log", "--shutdown-timeout-s", "7", "--allowed-origins", "a", "b",
        "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}',
    )  # fmt: skip
    other = settings(
        "--max_model_len=64", "--disable-uvicorn-access-log", "--shutdown-timeout", "7", "--allowed-origins",
        '["a", "b"]', "--speculative_config.method", "ngram", "--speculative-config.num_speculative_tokens=3",
        "--speculative-config.prompt_lookup_max", "5",
    )  # fmt: skip
    assert other == plain
    assert plain["server"].allowed_origins == ("a", "b")
    drafted = settings("--speculative-config", '{"model": "some/draft", "num_speculative_tokens": 2}')["speculative"]
    assert drafted.method == "draft_model"
    path = tmp_path / "vllm.yaml"
    for text in ("speculative-config: {method: ngram, num_speculative_tokens: 3}",
                 "speculative_config: '{\"method\": \"ngram\", \"num_speculative_tokens\": 3}'"):  # fmt: skip
        path.write_text(text)
        read = settings("--config", str(path))["speculative"]
        assert (read.method, read.num_speculative_tokens) == ("ngram", 3)
    with pytest.raises(ConfigError, match="given whole and by its members"):
        settings("--speculative-config", "{}", "--speculative-config.method", "ngram")
    assert settings("--served-model-name", "[not json", "[1")["server"].served_model_name == ("[not json", "[1")


def test_vllms_settings_that_ask_for_what_is_so_anyway(tmp_path, caplog):
    flags = (
        "-tp 1 --pipeline-parallel-size 1 -pcp 1 -dp=1 --disable-log-requests --no-enable-log-requests "
        "--task generate --enable-prompt-tokens-details --tokenizer-mode auto --logprobs-mode raw_logprobs"
    )
    assert settings(*flags.split()) == settings()
    assert not caplog.records
    assert settings("--safetensors-load-strategy", "eager", "--swap-space", "4") == settings()
    assert {record.getMessage().split(":")[1] for record in caplog.records} == {
        " swap_space has no effect",
        " safetensors_load_strategy has no effect",
    }
    path = tmp_path / "vllm.yaml"
    path.write_text("tensor-parallel-size: 1\ndisable-log-requests: true\nmax-num-seqs: 3\n")
    assert settings("--config", str(path))["scheduler"].max_num_seqs == 3
    path.write_text("prefill-context-parallel-size: 2\n")
    with pytest.raises(ConfigError, match=r"prefill_context_parallel_size='?2'? .*vllm.yaml\) is not supported"):
        settings("--config", str(path))


def test_settings_that_are_json(tmp_path, monkeypatch):
    given = settings("--override-generation-config", '{"temperature": 0.5}', "--default-chat-template-kwargs.a.b", "1")
    assert given["model"].override_generation_config == {"temperature": 0.5}
    assert given["server"].default_chat_template_kwargs == {"a": {"b": 1}}
    path = tmp_path / "quire.yaml"
    path.write_text("override_generation_config: {temperature: 0.5}\ndefault-chat-template-kwargs: '{\"c\": true}'\n")
    given = settings("--config", str(path))
    assert given["model"].override_generation_config == {"temperature": 0.5}
    assert given["server"].default_chat_template_kwargs == {"c": True}
    with pytest.raises(ConfigError, match="--override-generation-config expects a JSON object, got '5'"):
        settings("--override-generation-config", "5")


def test_a_key_does_not_swallow_the_model():
    built = settings("--api-key", "k1", "some/model")
    assert built["model"].model == "some/model"
    assert built["server"].api_key == ("k1",)


def test_command_line_beats_environment_beats_file(tmp_path, monkeypatch):
    path = tmp_path / "quire.yaml"
    path.write_text("port: 1\nmax-num-seqs: 2\nserved_model_name: [a, 5]\nhost: 127.1\nbanner: false\n")
    monkeypatch.setenv("QUIRE_PORT", "2")
    monkeypatch.setenv("QUIRE_API_KEY", "a, b")
    built = settings("--config", str(path), "--port", "3")
    assert built["server"].port == 3
    assert built["server"].api_key == ("a", "b")
    assert built["server"].served_model_name == ("a", "5")
    assert built["server"].host == "127.1"
    assert built["server"].banner is False
    assert built["scheduler"].max_num_seqs == 2
    assert settings("--config", str(path))["server"].port == 2
    monkeypatch.delenv("QUIRE_PORT")
    assert settings("--config", str(path))["server"].port == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 5", ["prot", "did you mean 'port'"]),
        ("port: 9x", ["--port", "9x"]),
        ("port: [1]", ["port", "[1]"]),
        ("port: {a: 1}", ["port"]),
        ("port: true", ["port", "True"]),
        ("host: [a]", ["host"]),
        ("host: yes", ["host"]),
        ("port: 99999", ["port", "65535"]),
        ("enable_prefix_caching: maybe", ["enable-prefix-caching", "maybe"]),
        ("- a list", ["list"]),
        ("{", ["cannot read"]),
    ],
)
def test_wrong_files_are_errors_that_name_the_setting(tmp_path, text, words):
    path = tmp_path / "quire.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        settings("--config", str(path))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], None),
        (["-O0"], {"mode": 0}),
        (["-O", "3"], {"mode": 1}),
        (["--compilation-config", '{"backend": "eager"}'], {"backend": "eager"}),
    ],
)
def test_torch_compile_is_asked_for(arguments, expected):
    assert settings("m", *arguments)["model"].compilation_config == expected


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        settings("--config", str(tmp_path / "none.yaml"))
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert settings("--config", str(tmp_path / "empty.yaml"))["server"].port == 8000


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["serve", "--max-num-seq", "4"], 2, "there is no flag --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--port", "x"], 2, "--port expects a whole number, got 'x'"),
        (["serve", "--port"], 2, "expected one argument"),
        (["serve", "a", "b"], 2, "unexpected argument 'b'"),
        (["serve", "--speculative-config", "{"], 2, "speculative_config is not JSON"),
        (["serve", "--speculative-config", "[]"], 2, "must be a JSON object"),
        (["serve", "-pcp", "2"], 2, "start a server for each host or device"),
        (["serve", "--task", "embed"], 2, "--runner and --convert say what a model is for"),
        (["serve", "--enable-log-requests"], 2, "--access-log logs requests without them"),
        (["serve", "--download-dir", "/tmp"], 2, "HF_HUB_CACHE"),
        (["serve", "--compilation-config", "[]"], 2, "--compilation-config expects a JSON object, got '[]'"),
        (["serve", "--compilation-config", '{"mod": 1}'], 2, "must have no keys but mode and backend"),
        (["serve", "-O1", "--compilation-config", "{}"], 2, "say the same thing; give one of them"),
        (["serve", "-O4"], 2, "argument -O: invalid choice"),
        (["plan", "-O2"], 2, "LlamaForCausalLM is one of Quire's own"),
        (["serve", "--served-model-name", ""], 2, "served_model_name must hold names that are not empty"),
        (["serve", "--chat-template", "no-such-file.jinja"], 2, "no-such-file.jinja"),
        (["srve"], 2, "did you mean 'serve'"),
        (["explain", "max_num_seq"], 2, "did you mean 'max_num_seqs'"),
        (["plan", "no/such/folder"], 1, "no/such/folder"),
    ],
)
def test_errors_are_short_and_name_the_remedy(capsys, arguments, status, words):
    got, _, err = run(capsys, *arguments)
    assert got == status
    assert words in err
    assert "Traceback" not in err
    assert len(err) < 1200


def test_usage_lists_commands_of_other_packages_too(capsys):
    for arguments in ([], ["--help"], ["help"]):
        status, out, _ = run(capsys, *arguments)
        assert status == 0
        for name in ("serve", "plan", "explain", "ops", "version"):
            assert f"  {name} " in out


def test_explain(capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "7")
    status, out, _ = run(capsys, "explain", "max_num_seqs")
    assert status == 0
    assert "7 requests (from environment)" in out
    assert "default  256" in out
    status, out, _ = run(capsys, "explain", "port", "--port", "5")
    assert "5 (from command line)" in out
    status, out, _ = run(capsys, "explain")
    assert status == 0
    assert "max_num_batched_tokens" in out
    assert "QUIRE_CPU_KERNELS" in out


def test_explain_hides_secrets(capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "hush,quiet")
    for arguments in (["explain", "api_key"], ["explain"]):
        _, out, _ = run(capsys, *arguments)
        assert "(2 hidden)" in out
        assert "hush" not in out


def test_version(capsys):
    from quire import __version__

    for name in ("version", "--version", "-V"):
        assert run(capsys, name)[1].strip() == f"quire {__version__}"


def children_processor_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_plan_takes_less_than_two_seconds_and_no_torch(tiny_folder):
    code = (
        "import sys; from quire_server.cli import main; status = main(sys.argv[1:]); "
        "print(sorted({'torch', 'numpy', 'transformers', 'uvicorn', 'fastapi'} & set(sys.modules)), file=sys.stderr); "
        "sys.exit(status)"
    )
    start_s = children_processor_s()
    command = [sys.executable, "-c", code, "plan", str(tiny_folder), "--json", "--max-model-len", "1k"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    seconds = children_processor_s() - start_s  # of the processor: others may be using it
    assert done.stderr.strip() == "[]"
    figures = json.loads(done.stdout)
    assert figures["max_model_len"] == 1000
    assert sum(figures["ledger_bytes"].values()) == figures["total_bytes"]
    assert seconds < 2


def test_plan_for_a_gpu_that_is_not_here(capsys, tiny_folder):
    def figures(device):
        status, out, _ = run(capsys, "plan", str(tiny_folder), "--json", "--device", device)
        assert status == 0
        return json.loads(out)

    named, sized = figures("cuda:H200"), figures("cuda:24GiB")
    assert named["free_bytes"] == (143771 - 1024) << 20
    assert sized["free_bytes"] == 23 << 30
    assert named["ledger_bytes"]["graphs"] > 0  # counted on GPUs only
    assert named["total_bytes"] <= named["free_bytes"]
    status, _, err = run(capsys, "plan", str(tiny_folder), "--device", "cuda:h2000")
    assert status == 2
    assert "GPU called 'h2000'; did you mean 'h200'?" in err
    assert "its driver takes 1024 MiB" in run(capsys, "plan", str(tiny_folder), "--device", "cuda:1GiB")[2]


def test_plan_of_a_narrow_kv_cache(capsys, tiny_folder):
    blocks = {}
    for dtype in ("bfloat16", "int8_per_token_head"):
        command = ("plan", str(tiny_folder), "--json", "--kv-cache-memory-bytes", "1M", "--kv-cache-dtype", dtype)
        status, out, _ = run(capsys, *command)
        assert status == 0
        figures = json.loads(out)
        blocks[figures["kv_cache_dtype"]] = figures["num_blocks"]
    assert blocks["int8"] == blocks["bfloat16"] * 2 * 16 // (16 + 4), "heads of 16"
    _, out, _ = run(capsys, "plan", str(tiny_folder), "--kv-cache-dtype", "fp8")
    assert "as fp8_e4m3" in out


def test_plan_for_people(capsys, tiny_folder):
    status, out, _ = run(capsys, "plan", str(tiny_folder))
    assert status == 0
    for words in ("KV cache", "together", "at the same time"):
        assert words in out


def test_plan_ends_with_a_verdict(capsys, tiny_folder):
    status, out, _ = run(capsys, "plan", str(tiny_folder))
    assert (status, out.splitlines()[-1].split(":")[0]) == (0, "FITS")
    asked = ("plan", str(tiny_folder), "--kv-cache-memory-bytes", "10T")
    status, out, err = run(capsys, *asked)
    assert (status, err) == (1, "")
    assert "  KV cache                    11.00 TB   --max-model-len, --kv-cache-dtype" in out
    verdict, ways = out.splitlines()[-2:]
    assert verdict.startswith("DOES NOT FIT by 10.9")
    assert "each of these alone makes it fit: --kv-cache-memory-bytes " in ways
    status, out, _ = run(capsys, *asked, "--json")
    figures = json.loads(out)
    assert (status, figures["fits"]) == (1, False)
    assert figures["shortage"].startswith("this takes 11.00 TB")
    assert "--kv-cache-memory-bytes" in figures["advice"]


def test_a_wrong_setting_that_only_the_engine_notices_has_the_status_of_wrong_settings():
    command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--attention-backend", "none-such"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "no attention backend 'none-such'" in done.stderr) == (2, True)


def test_serve_refuses_what_does_not_fit_before_it_takes_it(tiny_folder):
    command = [sys.executable, "-m", "quire_server.cli", "serve", str(tiny_folder), "--port", "0"]
    done = subprocess.run(
        [*command, "--num-gpu-blocks-override", "1000000000"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 4, "the engine could not start"
    assert "of memory are free on cpu" in done.stderr
    assert re.search(r"\n  KV cache +\d+", done.stderr)
    assert "--num-gpu-blocks-override" in done.stderr
    assert "Traceback" not in done.stderr


def test_plan_of_an_encoder_alone(capsys, tmp_path):
    config = {"architectures": ["BertModel"], "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96,
              "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, _ = run(capsys, "plan", str(tmp_path))
    assert status == 0
    assert "texts of up to 128 tokens" in out
    _, out, _ = run(capsys, "plan", str(tmp_path), "--json", "--max-num-batched-tokens", "500")
    plan = json.loads(out)
    assert plan["num_tokens"] == 500
    assert plan["ledger_bytes"]["weights: embedding"] == 4 * (200 + 128 + 2) * 64  # tokens, positions, types
    assert plan["total_bytes"] == sum(plan["ledger_bytes"].values())


@pytest.mark.parametrize("command", [("plan",), ("explain", "port"), ("serve", "--port", "99999")])
def test_misspelt_variables_are_named_at_the_start(tiny_folder, command):
    environment = {**os.environ, "QUIRE_MAX_NUM_SEQ": "4", "QUIRE_PORTS": "1", "QUIRE_MODEL": str(tiny_folder)}
    environment |= {"QUIRE_ROOT_PATH": "/x", "QUIRE_REQUIRE_BROWSER": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "quire_server.cli", *command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    lines = [line for line in run.stderr.splitlines() if "is not known" in line]
    assert len(lines) == 2, run.stderr
    assert "QUIRE_MAX_NUM_SEQ is not known and has no effect; did you mean QUIRE_MAX_NUM_SEQS?" in lines[0]
    assert "QUIRE_PORTS is not known and has no effect; did you mean QUIRE_PORT?" in lines[1]
    assert "is not known" not in run.stdout


def test_a_bad_value_names_its_variable(capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_PORT", "tcp://10.1.2.3:8000")
    status, _, err = run(capsys, "explain", "port")
    assert status == 2
    assert "QUIRE_PORT expects a whole number, got 'tcp://10.1.2.3:8000'" in err


def test_the_servers_settings_are_announced_to_other_programs():
    (point,) = entry_points(group="quire.settings", name="server")
    assert point.load() is ServerConfig


def test_eval_compares_forms_of_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "tiny")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    flags = ["--text", str(text), "--window", "32", "--max-model-len", "64", "--num-threads", "1", "--json"]
    status, out, err = run(capsys, "eval", str(folder), *flags, "--against", "int8", "int4")
    assert status == 0, err
    plain, int8, int4 = json.loads(out)
    # Random weights predict nothing: as good as choosing among all 1,024 tokens.
    assert 800 < plain["perplexity"] < 1400
    assert plain["change"] == 0
    assert plain["num_tokens"] == int8["num_tokens"] > 100
    assert 0 < abs(int8["change"]) < abs(int4["change"]) < 0.2
    assert int4["weights"].startswith("int4")
    status, _, err = run(capsys, "eval", str(folder), "--text", str(tmp_path / "nothing"))
    assert status == 2
    assert "cannot read" in err
    status, _, err = run(capsys, "eval", str(folder), *flags[:2], "--window", "100", "--max-model-len", "64")
    assert status == 1
    assert "window must be from 2 to 63" in err


def test_eval_counts_right_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tasks = tmp_path / "text.txt", tmp_path / "tasks.jsonl"
    text.write_text("Hello! How are you today?")

    def conversation(question: str, answer: str) -> str:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return json.dumps({"messages": turns})

    flags = [
        "--text",
        str(text),
        "--tasks",
        str(tasks),
        "--window",
        "64",
        "--max-model-len",
        "256",
        "--num-threads",
        "1",
    ]
    right = conversation('Spell the word "tree".', "t r e e")
    tasks.write_text("\n".join([right, conversation('Spell the word "tree".', "t r e"), right, ""]))
    status, out, err = run(capsys, "eval", *flags, "--json", "--against", "int8")
    assert status == 0, err
    assert [(line["answers_right"], line["num_answers"]) for line in json.loads(out)] == [(2, 3)] * 2
    for line, message in (
        (conversation("no answer", "x").replace("assistant", "user"), "its last message is no answer"),
        ("[]", "line 1 should be"),
        ("", "has no conversations"),
    ):
        tasks.write_text(line)
        status, _, err = run(capsys, "eval", *flags)
        assert status == 2
        assert message in err


def test_quantize_writes_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "model", like="llama", size="tiny")
    status, out, _ = run(capsys, "quantize", str(folder), str(tmp_path / "out"), "--scheme", "int8")
    assert status == 0
    assert "14 layers in int8, 0 matrices as they were" in out
    status, out, _ = run(capsys, "plan", str(tmp_path / "out"), "--json")
    assert status == 0
    status, _, err = run(capsys, "quantize", str(folder), str(tmp_path / "out"), "--scheme", "int8")
    assert status == 2
    assert "is not an empty folder" in err


def test_the_plan_follows_overridden_fields_of_config_json(capsys):
    sizes = {}
    for layers in ("5", "2"):
        arguments = ("plan", "--json", "--hf-overrides.num_hidden_layers", layers, "--load-format", "dummy")
        status, out, _ = run(capsys, *arguments)
        assert status == 0
        sizes[layers] = json.loads(out)["ledger_bytes"]["KV cache"]
    assert sizes["2"] * 5 == sizes["5"] * 2
    status, _, err = run(capsys, "plan", "--hf-overrides", '{"num_layer": 2}')
    assert status == 2
    assert "'num_layer', which LlamaForCausalLM does not read from config.json" in err
