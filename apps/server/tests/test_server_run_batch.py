"""`quire run-batch`: a file of requests answered without a server."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from quire import QuireConfig
from quire_interfaces import ConfigError
from quire_server.batches.run_batch import run_batch
from quire_server.cli import main
from quire_server.config import ServerConfig
from quire_testkit.fake_engine import FACTORY

ENGINE = {"vocab_size": 1024, "num_token_ids": 1000, "max_model_len": 512, "num_blocks": 512}


def line(custom_id: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def run(folder: Path, source: str, output: Path, **settings: Any) -> list[dict[str, Any]]:
    config = QuireConfig.of(model=str(folder), **settings)
    server = ServerConfig(response_store="none", served_model_name=("tiny",))
    assert run_batch(config, server, source, str(output), factory=(FACTORY, ENGINE)) == 0
    return [json.loads(each) for each in output.read_text().splitlines()]


def test_lines_are_answered_in_their_order(tiny_folder, tmp_path, capsys):
    hello = [{"role": "user", "content": "hello"}]
    texts = [
        line(str(index), "/v1/chat/completions", messages=hello, max_tokens=40 - index, ignore_eos=True)
        for index in range(40)
    ]
    texts[5] = line("5", "/v1/chat/completions", messages=hello, max_tokens=-1)
    texts[7] = "nonsense\n"
    texts[9] = line("9", "/v1/embeddings", input="x")
    texts[11] = line("11", "/v1/chat/completions", messages=hello, model="another")
    texts[13] = line("13", "/v1/completions", prompt="x", max_tokens=3, ignore_eos=True)
    (tmp_path / "in.jsonl").write_text("".join(texts))
    results = run(tiny_folder, str(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    assert [each["custom_id"] for each in results] == [None if index == 7 else str(index) for index in range(40)]
    status = {index: each["response"] and each["response"]["status_code"] for index, each in enumerate(results)}
    assert {index: code for index, code in status.items() if code != 200} == {5: 400, 7: None, 9: 404, 11: 404}
    assert results[20]["response"]["body"]["usage"]["completion_tokens"] == 20
    assert results[7]["error"]["code"] == "invalid_json_line"
    assert results[7]["line"] == 8
    assert "36 answered, 4 refused" in capsys.readouterr().err
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["in.jsonl", "out.jsonl"]


def test_wrong_files_are_named_before_anything_loads(tmp_path):
    (tmp_path / "in.jsonl").write_text(line("a", "/v1/completions", prompt="x") * 2)
    out = str(tmp_path / "out.jsonl")
    for source, output, said in (
        (str(tmp_path / "none.jsonl"), out, "there is no file"),
        (str(tmp_path / "in.jsonl"), out, "custom_id"),
        (str(tmp_path / "in.jsonl"), str(tmp_path / "none" / "out.jsonl"), "there is no folder"),
        (str(tmp_path / "in.jsonl"), "https://example.org/out", "must be a file here"),
        ("http://127.0.0.1:9/in.jsonl", out, "not public"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_batch(QuireConfig.of(), ServerConfig(), source, output)
    assert main(["run-batch", "-i", str(tmp_path / "none.jsonl"), "-o", out]) == 2


def test_an_input_comes_from_where_media_may_come_from(tiny_folder, tmp_path):
    text = line("a", "/v1/completions", prompt="x", max_tokens=3).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/in.jsonl"
        results = run(tiny_folder, url, tmp_path / "out.jsonl", allow_private_media_addresses=True)
        server.shutdown()
        thread.join()
    assert [each["custom_id"] for each in results] == ["a"]
