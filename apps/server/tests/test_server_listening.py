"""Where the server listens: Unix sockets and TLS, and what is wrong with them."""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest

# The library of the MCP servers brings this one along.
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from quire_interfaces import ConfigError
from quire_server.config import ServerConfig
from quire_server.listening import address_of, bind, check_tls, listen


def test_a_unix_socket_is_given_back(tmp_path: Path) -> None:
    server = ServerConfig(uds=str(tmp_path / "quire.sock"))
    for _ in range(2):
        with bind(server) as listening:
            listen(listening, server)
            assert address_of(listening, server) == f"http+unix://{tmp_path}/quire.sock"
            with pytest.raises(ConfigError, match="choose another --uds"), bind(server):
                pass
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(server.uds)
        assert not (tmp_path / "quire.sock").exists()


def test_a_socket_that_was_left_behind_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert path.exists()
    with bind(ServerConfig(uds=str(path))):
        pass
    path.write_text("mine")
    with pytest.raises(ConfigError, match="already in use"), bind(ServerConfig(uds=str(path))):
        pass
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="No such file"), bind(ServerConfig(uds=str(tmp_path / "none" / "x"))):
        pass


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "quire tests")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


def test_wrong_certificates_are_found_before_anything_is_loaded(tmp_path: Path) -> None:
    cert, key = map(str, certificate(tmp_path))
    check_tls(ServerConfig(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert, ssl_cert_reqs=2))
    for wrong, words in (
        ({"ssl_keyfile": key}, "give ssl_certfile, too"),
        ({"ssl_cert_reqs": 2}, "give ssl_certfile, too"),
        ({"enable_ssl_refresh": True}, "give ssl_certfile, too"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ciphers": "NONE-SUCH"}, "names no cipher"),
        ({"ssl_certfile": cert}, "cannot serve HTTPS"),
        ({"ssl_certfile": f"{cert}.none", "ssl_keyfile": key}, "No such file"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": key}, "cannot serve HTTPS"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_tls(ServerConfig(**wrong))


BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "ignore_eos": True, "stream": True}


def test_https(launch, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    files = {"ssl_certfile": str(cert), "ssl_keyfile": str(key), "ssl_ca_certs": str(cert)}
    url = launch(server=files).wait_for(r"OpenAI API:\s+(https://\S+)/v1")[1]
    trusting = ssl.create_default_context(cafile=str(cert))
    with httpx.Client(base_url=url, verify=trusting) as client:
        answer = client.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")
    demanding = launch(server={**files, "ssl_cert_reqs": 2}).wait_for(r"OpenAI API:\s+(https://\S+)/v1")[1]
    with httpx.Client(verify=trusting) as stranger, pytest.raises(httpx.TransportError):
        stranger.get(f"{demanding}/health")
    trusting.load_cert_chain(cert, key)
    with httpx.Client(verify=trusting) as known:
        assert known.get(f"{demanding}/health").status_code == 200


def test_ciphers(launch, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    files = {"ssl_certfile": str(cert), "ssl_keyfile": str(key), "ssl_ciphers": "ECDHE-ECDSA-AES256-GCM-SHA384"}
    url = launch(server=files).wait_for(r"OpenAI API:\s+(https://\S+)/v1")[1]
    for cipher, is_taken in (("ECDHE-ECDSA-AES256-GCM-SHA384", True), ("ECDHE-ECDSA-AES128-GCM-SHA256", False)):
        context = ssl.create_default_context(cafile=str(cert))
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(cipher)
        with httpx.Client(verify=context) as client:
            if is_taken:
                assert client.get(f"{url}/health").status_code == 200
            else:
                with pytest.raises(httpx.ConnectError):
                    client.get(f"{url}/health")


def test_a_new_certificate_is_taken_without_a_restart(launch, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    cert, key = certificate(tmp_path / "old")
    process = launch(server={"ssl_certfile": str(cert), "ssl_keyfile": str(key), "enable_ssl_refresh": True})
    url = process.wait_for(r"OpenAI API:\s+(https://\S+)/v1")[1]
    stays = httpx.Client(verify=ssl.create_default_context(cafile=str(cert)))
    assert stays.get(f"{url}/health").status_code == 200
    new_cert, new_key = certificate(tmp_path / "new")
    cert.write_bytes(b"half a certifi")
    process.wait_for("the changed certificate cannot be used")
    cert.write_bytes(new_cert.read_bytes())  # whose key is another one
    process.wait_for(r"(?s)cannot be used.*cannot be used")
    assert stays.get(f"{url}/health").status_code == 200
    with httpx.Client(verify=False) as careless:
        assert careless.get(f"{url}/health").status_code == 200, "the old pair serves until the new one is whole"
    key.write_bytes(new_key.read_bytes())
    process.wait_for("Read the certificate again")
    with httpx.Client(verify=ssl.create_default_context(cafile=str(new_cert))) as client:
        assert client.get(f"{url}/health").status_code == 200
    assert stays.get(f"{url}/health").status_code == 200, "connections that are open go on"
    stays.close()


def test_http_over_a_unix_socket(launch, tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    process = launch(server={"uds": str(path)})
    process.wait_for(r"OpenAI API:\s+http\+unix://")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://quire") as client:
        assert client.get("/health").status_code == 200
        assert client.post("/v1/chat/completions", json=BODY).text.endswith("data: [DONE]\n\n")
    process.popen.terminate()
    assert process.end() == 0, process.output
    assert "Traceback" not in process.output
    assert not path.exists()
