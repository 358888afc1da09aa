"""Files of deploy/: every command line is one that `quire` takes, and what their own tools say of them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.config import QuireConfig
from quire.setting_fields import config_fields
from quire_observability import EngineMetrics
from quire_server.command_line import Parser, add_setting_flags
from quire_server.config import ServerConfig

DEPLOY = Path(__file__).parents[1] / "deploy"
FIELDS = config_fields({**QuireConfig.sections(), "server": ServerConfig})


def check_serve(words: list[str]) -> None:
    """Raises SystemExit where `quire serve` takes no such flags."""
    command, *arguments = words
    assert command == "serve"
    parser = Parser("quire serve")
    parser.add_argument("MODEL", nargs="?")
    add_setting_flags(parser, FIELDS)
    _, unknown = parser.parse_known_args(arguments)
    assert not unknown


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def test_services_of_compose_run_what_there_is() -> None:
    servers = [name for name in services() if name.startswith("server")]
    assert len(servers) == 2
    for name in servers:
        check_serve(services()[name]["command"])
        assert f"http://{name}:8000" in services()["router"]["command"][-1]
    tier = services()[servers[0]]["command"]
    host, port = tier[tier.index("--kv-tier") + 1].removeprefix("tcp://").split(":")
    store = services()[host]["command"]
    assert store[0] == "kv-serve"
    assert store[store.index("--listen") + 1].endswith(f":{port}")
    for name, service in services().items():
        assert set(service.get("depends_on", [])) <= services().keys(), name


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    text = (DEPLOY / "quire.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, *words = shlex.split(command)
    check_serve(words)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: quire.service was NOT verified")
    unit = tmp_path / "quire.service"
    unit.write_text(text.replace(program, sys.executable))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    # It also complains of units of the machine itself.
    complaints = [line for line in verified.stderr.splitlines() if "quire.service" in line]
    assert not complaints


def test_the_image_has_what_its_commands_name() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    (program,) = re.findall(r'^ENTRYPOINT \["(.*)"\]$', text, re.MULTILINE)
    assert f"ExecStart={program} " in (DEPLOY / "quire.service").read_text()
    (words,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    check_serve(yaml.safe_load(words))
    assert (DEPLOY.parent / "apps/server/pyproject.toml").is_file()
    assert '"/source/apps/server[$EXTRAS]"' in text
    assert "--compile-bytecode" in text, "the user that serves may write no compiled modules"
    project = tomllib.loads((DEPLOY.parent / "apps/server/pyproject.toml").read_text())["project"]
    named = set(re.findall(r"EXTRAS=([\w,]+)", text))
    assert named == {"cpu", "cpu,cuda", "cpu,rocm"}
    assert {extra for each in named for extra in each.split(",")} <= project["optional-dependencies"].keys()


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "helm/quire/values.yaml").read_text())
    return found


def test_templates_of_the_chart_name_values_that_there_are() -> None:
    names: set[str] = set()
    for path in (DEPLOY / "helm/quire/templates").iterdir():
        for name in re.findall(r"\.Values\.([\w.]+)", path.read_text()):
            value: Any = values()
            for part in name.split("."):
                assert part in value, f"{path.name}: .Values.{name}"
                value = value[part]
            names.add(name.split(".")[0])
    assert names == values().keys(), "every value is used"


def test_the_chart_starts_what_quire_takes() -> None:
    text = (DEPLOY / "helm/quire/templates/deployment.yaml").read_text()
    words = text.partition("args:\n")[2].partition("{{- range")[0]
    for name, value in values().items():
        words = words.replace(f"{{{{ .Values.{name} | quote }}}}", f'"{value}"')
    check_serve(yaml.safe_load(words))


def test_alerts_name_metrics_that_a_server_has(tmp_path: Path) -> None:
    folder = DEPLOY / "prometheus"
    scrape = yaml.safe_load((folder / "prometheus.yml").read_text())
    assert all((folder / name).is_file() for name in scrape["rule_files"])
    (targets,) = (each["targets"] for job in scrape["scrape_configs"] for each in job["static_configs"])
    assert {target.partition(":")[0] for target in targets} <= services().keys()
    groups = yaml.safe_load((folder / "alerts.yml").read_text())["groups"]
    text = " ".join(rule["expr"] for group in groups for rule in group["rules"])
    named = set(re.findall(r"quire:\w+", text))
    families = {
        family.name + suffix
        for family in EngineMetrics().collect()
        for suffix in ("", "_total" if family.type == "counter" else "_bucket")
    }
    assert named
    assert named <= families
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here: the rules were NOT checked by it")
    subprocess.run(["promtool", "check", "rules", folder / "alerts.yml"], check=True)


def test_helm_renders_the_chart() -> None:
    if shutil.which("helm") is None:
        pytest.skip("helm is not here: the chart was NOT rendered")
    chart = str(DEPLOY / "helm/quire")
    subprocess.run(["helm", "lint", chart], check=True)
    rendered = subprocess.run(["helm", "template", "name", chart], capture_output=True, text=True, check=True).stdout
    kinds = [each["kind"] for each in yaml.safe_load_all(rendered) if each]
    assert sorted(kinds) == ["Deployment", "Service"]
