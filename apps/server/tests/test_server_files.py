"""Files: uploaded, listed, read, deleted and named in requests, as the official client speaks of them."""

from __future__ import annotations

import base64
import io
import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import FileObject

from quire_interfaces import ConfigError
from quire_server.config import ServerConfig
from quire_server.files.file_store import FileStore, open_database
from quire_server.files.folder import check_files_dir

MAX_BYTES = 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "files"


@pytest.fixture(scope="module")
def server(make_scripted, folder):
    return make_scripted(
        files_dir=str(folder), files_max_bytes=MAX_BYTES, files_max_total_bytes=3 * MAX_BYTES, body_timeout_s=2.0
    )


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as client:
        yield client


def contents(folder: Path) -> set[str]:
    return {path.name for path in (folder / "contents").iterdir()}


def upload(server: Any, content: bytes = b"text", name: str = "a.txt", **fields: str) -> httpx.Response:
    return server.client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "user_data", **fields})


def test_a_file_is_made_listed_read_and_deleted(client, server, folder):
    content = bytes(range(256)) * 300
    made = client.files.create(
        file=('Größe: "1".bin', content), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    raw = server.client.get(f"/v1/files/{made.id}")
    FileObject.model_validate_json(raw.text, strict=True)
    assert (made.bytes, made.purpose, made.expires_at - made.created_at) == (len(content), "user_data", 3600)
    assert client.files.retrieve(made.id).to_dict() == made.to_dict()
    read = client.files.content(made.id)
    assert read.content == content
    assert read.response.headers["content-disposition"].startswith("attachment")
    part = server.client.get(f"/v1/files/{made.id}/content", headers={"range": "bytes=1-3"})
    assert (part.status_code, part.content) == (206, content[1:4])
    others = [client.files.create(file=(f"{i}", b"x"), purpose="batch").id for i in range(3)]
    assert [each.id for each in client.files.list(limit=2)] == [*reversed(others), made.id], "page after page"
    assert [each.id for each in client.files.list(order="asc", after=made.id)] == others
    assert [each.id for each in client.files.list(purpose="user_data")] == [made.id]
    for name in (made.id, *others):
        assert client.files.delete(name).deleted
        for gone in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                gone(name)
    assert contents(folder) == set()


@pytest.mark.parametrize(
    ("request_", "status", "param"),
    [
        ({"files": {"file": ("a", b"x")}}, 400, "purpose"),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "fun"}}, 400, "purpose"),
        ({"files": {"other": ("a", b"x")}, "data": {"purpose": "batch"}}, 400, "file"),
        ({"files": [("file", ("a", b"x")), ("file", ("b", b"y"))], "data": {"purpose": "batch"}}, 400, "file"),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "p" * 2000}}, 400, "purpose"),
        ({"files": {"file": ("a", b"x" * (MAX_BYTES + 1))}, "data": {"purpose": "batch"}}, 413, "file"),
        (
            {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch", "expires_after[seconds]": "9"}},
            400,
            "expires_after",
        ),
        ({"json": {"purpose": "batch"}}, 415, None),
        ({"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400, "body"),
        ({"content": b"nothing", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400, "body"),
    ],
    ids=range(10),
)
def test_what_is_no_upload_says_why_and_leaves_nothing(server, folder, request_, status, param):
    reply = server.client.post("/v1/files", **request_)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
    assert contents(folder) == set()


def test_no_name_of_a_client_s_reaches_the_disk(server, folder):
    for name in ("../../escaped", "/etc/passwd", "a/../b", "..", "\\..\\x"):
        made = upload(server, name=name).json()
        assert contents(folder) == {made["id"]}
        assert server.client.delete(f"/v1/files/{made['id']}").status_code == 200
    for path in ("..%2Ffiles.sqlite", "%2e%2e%2ffiles.sqlite", "batches.lock"):
        assert server.client.get(f"/v1/files/{path}/content").status_code == 404
    assert not (folder.parent / "escaped").exists()


def test_a_client_that_leaves_or_dawdles_leaves_nothing(server, folder):
    host, port = server.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        "Content-Length: 90000\r\n\r\n"
        '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    ).encode()
    with socket.create_connection((host, int(port))) as leaving:
        leaving.sendall(head + b"y" * 50_000)
        deadline = time.monotonic() + 20
        while not contents(folder) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(contents(folder)) == 1
    deadline = time.monotonic() + 20
    while contents(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert contents(folder) == set()
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(head)
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")
    assert contents(folder) == set()


def test_all_files_together_have_a_bound(server, folder):
    made = [upload(server, b"x" * MAX_BYTES).json()["id"] for _ in range(3)]
    reply = upload(server, b"x")
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_room")
    assert "--files-max-total-bytes" in reply.json()["error"]["message"]
    assert contents(folder) == set(made)
    for name in made:
        server.client.delete(f"/v1/files/{name}")
    assert upload(server, b"x").status_code == 200
    for name in contents(folder):
        server.client.delete(f"/v1/files/{name}")


def test_what_a_killed_server_left_is_removed_and_what_somebody_writes_is_not(tmp_path):
    database = open_database(tmp_path)

    def store() -> FileStore:
        return FileStore(tmp_path, database, max_total_bytes=1 << 20, max_owner_bytes=1 << 20)

    first = store()
    arriving, expired = first.begin("ann"), first.begin("ann")
    arriving.write(b"still arriving")
    expired.write(b"x")
    expired.keep(purpose="batch", filename="x", expires_after_s=-1)
    (tmp_path / "contents" / "file-left").write_bytes(b"of a killed server")
    assert first.get(expired.id, owner="ann") is None
    second = store()
    assert contents(tmp_path) == {arriving.id}
    kept = arriving.keep(purpose="batch", filename="x", expires_after_s=None)
    second.sweep()
    assert second.get(kept.id, owner="ann") == kept
    assert second.get(kept.id, owner="ben") is None
    assert second.path_of(kept.id).read_bytes() == b"still arriving"
    database.close()


def test_files_belong_to_the_key_that_made_them(make_scripted, tmp_path):
    keys = make_scripted(
        files_dir=str(tmp_path / "files"), api_key=("key-of-ann", "key-of-ben"), files_max_total_bytes=2000
    )
    with keys.openai(api_key="key-of-ann") as ann, keys.openai(api_key="key-of-ben") as ben:
        name = ann.files.create(file=("a.txt", b"secret"), purpose="user_data").id
        for gone in (ben.files.retrieve, ben.files.content, ben.files.delete):
            with pytest.raises(openai.NotFoundError) as caught:
                gone(name)
            with pytest.raises(openai.NotFoundError) as never:
                gone("file-never")
            assert str(caught.value).replace(name, "file-never") == str(never.value)
        assert list(ben.files.list()) == []
        part = {"type": "input_file", "file_id": name}
        with pytest.raises(openai.NotFoundError):
            ben.responses.create(model="tiny", input=[{"role": "user", "content": [part]}])
        with pytest.raises(openai.BadRequestError, match="one API key"):
            ben.files.create(file=("b", b"x" * 1001), purpose="user_data")
        assert ann.files.content(name).content == b"secret"


def test_texts_are_named_by_their_ids(client, server):
    text = client.files.create(file=("notes.txt", "¤Grüße¥".encode()), purpose="user_data").id
    binary = client.files.create(file=("a.pdf", b"%PDF\x00\xff"), purpose="user_data").id
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "file", "file": {"file_id": text}}]}],
    )
    assert chat.choices[0].message.content == "Grüße"
    response = client.responses.create(
        model="tiny", input=[{"role": "user", "content": [{"type": "input_file", "file_id": text}]}]
    )
    assert response.output_text == "Grüße"
    document = {"type": "document", "source": {"type": "file", "file_id": text}}
    messages = [{"role": "user", "content": [document]}]
    answer = server.post("/v1/messages", {"model": "tiny", "max_tokens": 20, "messages": messages}).json()
    assert answer["content"][0]["text"] == "Grüße"
    for name, error in ((binary, openai.BadRequestError), ("file-none", openai.NotFoundError)):
        with pytest.raises(error) as caught:
            client.responses.create(
                model="tiny", input=[{"role": "user", "content": [{"type": "input_file", "file_id": name}]}]
            )
        assert caught.value.param == "input[0].content[0]"
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"file_id": {"type": "string"}}}},
    }
    hello = [{"role": "user", "content": "¤Hi¥"}]
    assert client.chat.completions.create(model="tiny", messages=hello, tools=[tool]).choices[0].message.content == "Hi"


def test_images_are_named_by_their_ids(quire_serve, tmp_path):
    """The demo model sees the same, by whatever way the image comes."""
    pillow = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    pillow.new("RGB", (64, 64), "red").save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    process = quire_serve("--files-dir", str(tmp_path / "files"))
    with httpx.Client(base_url=process.url(), timeout=120) as http:
        form = {"files": {"file": ("red.png", buffer.getvalue())}, "data": {"purpose": "vision"}}
        name = http.post("/v1/files", **form).json()["id"]

        def answered(path: str, body: dict[str, Any]) -> Any:
            reply = http.post(path, json={"temperature": 0, **body})
            assert reply.status_code == 200, reply.text
            usage = reply.json()["usage"]
            return usage.get("prompt_tokens", usage.get("input_tokens"))

        def chat(part: dict[str, Any]) -> Any:
            return answered(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
            )

        def respond(part: dict[str, Any]) -> Any:
            return answered("/v1/responses", {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 1})

        def message(source: dict[str, Any]) -> Any:
            part = {"type": "image", "source": source}
            return answered("/v1/messages", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})

        inline = chat({"type": "image_url", "image_url": {"url": url}})
        assert inline > 10
        assert chat({"type": "file", "file": {"file_id": name}}) == inline
        assert respond({"type": "input_image", "image_url": url}) == respond({"type": "input_image", "file_id": name})
        assert respond({"type": "input_file", "file_id": name}) == respond({"type": "input_image", "image_url": url})
        data = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        assert message({"type": "file", "file_id": name}) == message(data)


def test_a_server_without_a_folder_says_which_flag_to_set(live, tmp_path):
    for method, path in (
        ("GET", "/v1/files"),
        ("GET", "/v1/files/x"),
        ("GET", "/v1/batches"),
        ("DELETE", "/v1/files/x"),
    ):
        reply = live.client.request(method, path)
        assert reply.status_code == 400
        assert "--files-dir" in reply.json()["error"]["message"]
    assert upload(live).status_code == 400
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep files"):
        check_files_dir(ServerConfig(files_dir=str(tmp_path / "file" / "folder")))


def test_the_document_has_the_form(live):
    post = json.loads(live.client.get("/openapi.json").text)["paths"]["/v1/files"]["post"]
    assert set(post["requestBody"]["content"]["multipart/form-data"]["schema"]["required"]) == {"file", "purpose"}
