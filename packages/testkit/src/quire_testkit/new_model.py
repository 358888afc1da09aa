"""The command `quire new-model`: the file, the registry line and the parity case of a new architecture.

What it writes loads and runs as Llama does, and is to be changed until `quire verify` says ok. A class that takes media
has its towers and its processor in Transformers, and mostly a language model that Quire has: it takes a parity case.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from quire_interfaces import ConfigError

__all__ = ["register_new_model", "write_model"]

FAMILY = '''"""{title} (authors and year of the paper): what it does differently."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Llama's layers, without biases."""
    sizes = decoder_sizes(config)
    return sizes.network(sizes.pre_norm(layer, sizes.attention()) for layer in sizes.layers)
'''

MEDIA_CASE = """    "{architecture}": ParityCase(
        config="{config_class}",
        fields={{
            "image_token_id": 190,
            "text_config": text("llama", head_dim=16),
            "vision_config": vision("siglip_vision_model"),
            "tie_word_embeddings": False,
        }},
    ),"""


def write_model(root: Path, architecture: str, model_type: str, config_class: str) -> list[Path]:
    """Write the files of a new architecture into a checkout, and its lines into the tables.

    Args:
        root: The repository.
        architecture: Name of the Transformers class, as config.json has it.
        model_type: As config.json has it; also the name of the file.
        config_class: Name of the configuration class of Transformers.

    Returns:
        What was written.

    Raises:
        ConfigError: Not a checkout, a name that cannot be one, or an architecture that is there already.

    A class that takes media (`...ForConditionalGeneration`) gets a parity case alone.
    """
    models = root / "packages" / "models" / "src" / "quire_models"
    registry = models / "registry.py"
    parity = root / "packages" / "testkit" / "src" / "quire_testkit" / "parity"
    cases = parity / "dense_cases.py"
    if not registry.is_file() or not cases.is_file():
        raise ConfigError(f"{root} is not a checkout of Quire; run this command in one, or give --root")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", model_type):
        raise ConfigError(f"model_type must be a name in lower case, as a Python module's, got {model_type!r}")
    for name in (architecture, config_class):
        if not name.isidentifier():
            raise ConfigError(f"{name!r} is not the name of a class; give it as transformers has it")
    if architecture.endswith("ForConditionalGeneration"):
        return [_write_media_case(parity, architecture, config_class)]
    family = models / "families" / f"{model_type}.py"
    if family.exists() or f'"{architecture}"' in registry.read_text(encoding="utf-8"):
        raise ConfigError(f"{architecture} is there already: see {family}; remove it first to begin anew")
    title = re.sub(r"For[A-Z]\w+$|LMHeadModel$", "", architecture)
    family.write_text(FAMILY.format(title=title), encoding="utf-8")
    line = f'    "{architecture}": Architecture("{model_type}"),'
    _insert(registry, "ARCHITECTURES: dict[str, Architecture] = {", line)
    _insert(cases, "DENSE_CASES: dict[str, ParityCase] = {", f'    "{architecture}": case("{config_class}"),')
    return [family, registry, cases]


def _write_media_case(parity: Path, architecture: str, config_class: str) -> Path:
    """Add the case of a class that takes media: a language model of Llama's kind behind a tower of SigLIP's."""
    if any(f'"{architecture}"' in path.read_text(encoding="utf-8") for path in parity.glob("*_cases.py")):
        raise ConfigError(f"{architecture} has a case already; change it, or remove it first to begin anew")
    cases = parity / "vision_cases.py"
    case = MEDIA_CASE.format(architecture=architecture, config_class=config_class)
    _insert(cases, "VISION_CASES: dict[str, ParityCase] = {", case)
    return cases


def _insert(path: Path, opening: str, line: str) -> None:
    """Add an entry as the first of a table."""
    text = path.read_text(encoding="utf-8")
    if opening not in text:
        raise ConfigError(f"{path} has no line {opening!r}; add by hand: {line.strip()}")
    path.write_text(text.replace(opening, f"{opening}\n{line}", 1), encoding="utf-8")


def register_new_model(commands: Any) -> None:
    """Add `new-model` to the command line."""
    parser = commands.add_parser("new-model", help="begin an architecture: file, registry line, parity case")
    parser.add_argument("ARCHITECTURE", help="name of the Transformers class, e.g. MyModelForCausalLM")
    parser.add_argument("--model-type", required=True, help="as in config.json, e.g. my_model; also the file's name")
    parser.add_argument("--config-class", required=True, help="Transformers' configuration class, e.g. MyModelConfig")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (default: here)")
    parser.set_defaults(run=run_new_model)


def run_new_model(args: argparse.Namespace) -> int:
    """Write, and say what is next."""
    for path in write_model(args.root, args.ARCHITECTURE, args.model_type, args.config_class):
        print(path)
    print(f"now change them until `quire verify {args.ARCHITECTURE}` says ok (docs/adding-a-model.md)")
    return 0
