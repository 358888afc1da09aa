"""Settings that change while a server runs: effects, refusals, all or nothing, undoing, the log, restarts."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import signal
import time
from typing import Any

import pytest

ADMIN = {"authorization": "Bearer admin"}
USER = {"authorization": "Bearer sk-user"}
PATH = "/v1/admin/config"


@pytest.fixture(scope="module")
def server(make_live: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("user: sk-user\n")
    keys.chmod(0o600)
    settings = {"data_parallel_size": 2, "max_num_seqs": 4, "max_running_per_tenant": 3}
    return make_live(
        api_key_file=str(keys),
        admin_api_key=("admin",),
        engine={"max_num_seqs": 4, "step_time_s": 0.002},
        config=settings,
    )


@pytest.fixture(autouse=True)
def as_at_the_start(server: Any) -> Any:
    yield
    changed = [name for name, each in shown(server)["settings"].items() if each["is_changed"]]
    assert patch(server, dict.fromkeys(changed)).status_code == 200


def shown(server: Any) -> Any:
    return server.client.get(PATH, headers=ADMIN).json()


def patch(server: Any, settings: dict[str, Any], **more: Any) -> Any:
    return server.client.patch(PATH, headers=ADMIN, json={"settings": settings, **more})


def complete(server: Any, **fields: Any) -> Any:
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "seed": 1, **fields}
    return server.client.post("/v1/completions", headers=USER, json=body)


def test_settings_are_shown_changed_and_set_back(server: Any) -> None:
    before = shown(server)
    assert before["settings"]["max_num_seqs"] == {"value": 4, "value_at_start": 4, "is_changed": False}
    answer = patch(server, {"max_num_seqs": 2, "max_prompts_per_request": 1}).json()
    assert answer["revision"] == before["revision"] + 1
    assert answer["settings"]["max_num_seqs"] == {"value": 2, "value_at_start": 4, "is_changed": True}
    assert answer["history"][0]["changes"] == {"max_num_seqs": 2, "max_prompts_per_request": 1}
    assert answer == shown(server)
    refused = complete(server, prompt=[[1], [2]])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert patch(server, {"max_prompts_per_request": None}).json()["settings"]["max_num_seqs"]["value"] == 2
    assert complete(server, prompt=[[1], [2]]).status_code == 200


def test_fewer_requests_run_in_every_engine(server: Any) -> None:
    def most_running() -> int:
        most = 0
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            works = [pool.submit(complete, server, max_tokens=60, ignore_eos=True) for _ in range(8)]
            while not all(work.done() for work in works):
                most = max(most, server.call(server.llm.client.stats()).num_running)
                time.sleep(0.005)
            assert {work.result().status_code for work in works} == {200}
        return most

    assert most_running() > 2
    assert patch(server, {"max_num_seqs": 1}).status_code == 200
    assert most_running() <= 2  # one in each of two engines


def test_one_wrong_value_changes_nothing(server: Any) -> None:
    before = shown(server)
    for settings, param, words in (
        ({"max_num_seqs": 2, "max_num_batched_tokens": 10**6}, "max_num_batched_tokens", "must be at most"),
        ({"max_num_seqs": 0}, "max_num_seqs", "must be"),
        ({"max_num_seqs": True}, "max_num_seqs", "must be a whole number, got True"),
        ({"enable_force_include_usage": "yes"}, "enable_force_include_usage", "must be true or false"),
        ({"max_num_seq": 2}, "max_num_seq", "did you mean 'max_num_seqs'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", "needs a restart"),
        ({"override_generation_config": {"heat": 1}}, "override_generation_config", "no 'heat'"),
        ({"log_level": "loud"}, "log_level", "must be"),
        ({"max_running_per_tenant": 0}, "max_running_per_tenant", "and not to 0"),
        ({"api_key_limits": {"nobody": {}}}, "api_key_limits", "no API key of the name 'nobody'"),
        ({"api_key_limits": {"user": {"tokens": 1}}}, "api_key_limits", "not 'tokens'"),
        ({"api_key_limits": {"user": {"tokens_per_day": "1"}}}, "api_key_limits", "whole numbers"),
    ):
        response = patch(server, {"max_prompts_per_request": 7, **settings})
        assert response.status_code == 400, settings
        error = response.json()["error"]
        assert error["param"] == param, settings
        assert words in error["message"], error
    assert patch(server, {}, extra=1).status_code == 400
    assert shown(server) == before


def test_defaults_of_sampling_and_fields_of_answers_change(server: Any) -> None:
    warm, cold = (complete(server, temperature=t).json()["choices"][0]["text"] for t in (1.0, 0.0))
    assert complete(server).json()["choices"][0]["text"] == warm
    changes = {"override_generation_config": {"temperature": 0.0}, "enable_per_request_metrics": True}
    assert patch(server, changes).status_code == 200
    answer = complete(server).json()
    assert answer["choices"][0]["text"] == cold
    assert answer["metrics"]["queue_time_ms"] >= 0


def test_limits_of_keys_change(server: Any) -> None:
    assert patch(server, {"api_key_limits": {"user": {"requests_per_minute": 1}}}).status_code == 200
    assert complete(server).status_code == 200
    assert complete(server).status_code == 429
    assert patch(server, {"api_key_limits": None}).status_code == 200
    assert complete(server).status_code == 200


def test_changes_are_undone_one_by_one_and_logged(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    while server.client.post(f"{PATH}/rollback", headers=ADMIN).status_code == 200:
        pass
    caplog.clear()
    with caplog.at_level(logging.INFO, "quire.audit"):
        assert patch(server, {"max_num_seqs": 3}).status_code == 200
        assert patch(server, {"max_num_seqs": 2, "max_queued_requests": 9}).status_code == 200
        assert patch(server, {"max_num_seqs": 1}, dry_run=True).json()["settings"]["max_num_seqs"]["value"] == 2
        patch(server, {"max_num_seqs": -1})

        def undo() -> Any:
            return server.client.post(f"{PATH}/rollback", headers=ADMIN)

        settings = undo().json()["settings"]
        assert (settings["max_num_seqs"]["value"], settings["max_queued_requests"]["is_changed"]) == (3, False)
        assert undo().json()["settings"]["max_num_seqs"]["value"] == 4
        assert (undo().status_code, undo().json()["error"]["code"]) == (400, "nothing_to_undo")
    lines = [record.getMessage() for record in caplog.records if record.name == "quire.audit"]
    assert len(lines) == 5
    assert "max_num_seqs 4 -> 3" in lines[0]
    assert "max_num_seqs 3 -> 2" in lines[1]
    assert lines[2].startswith("settings not changed by key-")
    assert "rolled back" in lines[3]


def test_an_engine_that_is_started_again_has_them(server: Any) -> None:
    assert patch(server, {"max_num_seqs": 1}).status_code == 200
    (engine, _) = server.llm.client.engines.values()
    restarts = engine.num_restarts
    os.kill(engine.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while engine.num_restarts == restarts or engine.is_loading:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    with pytest.raises(Exception, match="at most 4"):
        server.call(engine.reconfigure({"max_num_seqs": 5}))
    most = 0
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = {"max_tokens": 60, "ignore_eos": True, "data_parallel_rank": 0}
        works = [pool.submit(complete, server, **asked) for _ in range(4)]
        while not all(work.done() for work in works):
            most = max(most, server.call(engine.stats()).num_running)
            time.sleep(0.005)
    assert most == 1


def test_administrators_alone_see_and_change_them(server: Any, live: Any) -> None:
    for method, path in (("GET", PATH), ("PATCH", PATH), ("POST", f"{PATH}/rollback")):
        body = {"settings": {}} if method == "PATCH" else None
        assert server.client.request(method, path, headers=USER, json=body).status_code == 403
        assert live.client.request(method, path, json=body).status_code == 404
