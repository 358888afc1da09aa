"""IO-processor plug-ins: found by their entry points, they read and write the bodies of POST /pooling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire_interfaces import ConfigError
from quire_server.io_processors import load_io_processor
from quire_testkit.fake_runner import expected_pooled


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A package with plug-ins, as a package manager leaves it."""
    folder = tmp_path_factory.mktemp("plugins")
    info = folder / "word_vectors-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: word-vectors\nVersion: 1.0\n")
    points = "words = server_io_processor:WordVectors\nbroken = server_no_such_module:Plugin\n"
    (info / "entry_points.txt").write_text(f"[quire.io_processors]\n{points}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.syspath_prepend(Path(__file__).parent)
        yield


@pytest.fixture(scope="module")
def served(make_live: Any, installed: None) -> Any:
    return make_live(engine={"pooling_tasks": ["embed"]}, io_processor_plugin="words")


def test_a_plug_in_reads_the_request_and_writes_the_answer(served: Any) -> None:
    body = {"task": "plugin", "data": {"words": ["quire", "sheet"]}, "request_id": "mine"}
    response = served.post("/pooling", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["request_id"], answer["data"]["model"]) == ("pool-mine", "fake")
    for word, vector in answer["data"]["vectors"].items():
        expected = expected_pooled(served.llm.renderer.tokenizer.encode(word))
        assert len(vector) == expected.shape[0]
        assert vector[1] == len(served.llm.renderer.tokenizer.encode(word))
    assert served.post("/pooling", {"data": {"words": ["quire"]}}).json()["data"]["vectors"].keys() == {"quire"}
    assert served.post("/pooling", {"input": "quire"}).json()["data"][0]["index"] == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"data": {"words": "quire"}}, "data"),
        ({"data": 5}, "data"),
        ({"task": "plugin"}, "data"),
        ({"data": {"words": ["a", "long " * 600]}}, "data[1]"),
        ({"data": {"words": [5]}}, "data[0]"),
        ({"data": {"words": ["a"]}, "input": "a"}, "input"),
    ],
)
def test_what_a_plug_in_cannot_read_is_named(served: Any, body: dict[str, Any], param: str) -> None:
    response = served.post("/pooling", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_without_a_plug_in_the_task_is_refused(live: Any) -> None:
    error = live.post("/pooling", {"task": "plugin", "data": 5}).json()["error"]
    assert error["message"].startswith("No IOProcessor plugin installed")
    assert error["param"] == "task"


@pytest.mark.parametrize(("name", "complaint"), [("sentences", "words"), ("broken", "server_no_such_module")])
def test_a_plug_in_that_cannot_be_had_ends_the_start(installed: None, name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_io_processor(name)
    assert caught.value.field == "io_processor_plugin"
