"""Models on this machine: those in the Hugging Face hub's cache, and those in a folder of models.

What is listed, downloaded and removed is what `quire serve` would find under the same names.
"""

from __future__ import annotations

import datetime
import difflib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import QuireConfig
from quire.assemble import model_folder
from quire_interfaces import CheckpointError, ConfigError, QuireError
from quire_models.config import ModelConfig
from quire_models.gguf.choice import chosen_file, model_files, parts_of
from quire_models.hub import HUB_FILE_PATTERNS, resolve_model
from quire_models.ledger import num_parameters
from quire_server.model_router.pool import find_models

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

__all__ = [
    "LocalModel",
    "chat_template_of",
    "facts_of",
    "find_local",
    "list_models",
    "local_path",
    "models_as_json",
    "pull",
    "removal",
]

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model, or one revision of it."""

    name: str
    place: str
    """hub or folder."""
    path: str
    size_bytes: int
    """On the disk; what revisions share counts for each of them."""
    last_used_s: float
    """When a file of it was last read, seconds since 1970, as far as the file system notes that."""
    revisions: tuple[str, ...] = ()
    """Commits on the hub, that of main first, then the newest, each with its branches and tags: "3a1f... (main)"."""
    has_weights: bool = True


def list_models(models_dir: str | None, cache_dir: str | None = None) -> tuple[list[LocalModel], list[str]]:
    """All models, the last used ones first, and what is wrong with the cache.

    Args:
        models_dir: A folder of models; None for none.
        cache_dir: Of the hub; None for where its library looks.

    Raises:
        ConfigError: `models_dir` is no folder.
    """
    info = _scan(cache_dir)
    repos = [] if info is None else [each for each in info.repos if each.repo_type == "model"]
    models = []
    for repo in repos:
        revisions = sorted(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified), reverse=True)
        names = tuple(
            f"{each.commit_hash} ({', '.join(sorted(each.refs))})" if each.refs else each.commit_hash
            for each in revisions
        )
        files = [file.file_name for each in revisions for file in each.files]
        has_weights = any(name.endswith(_WEIGHTS) for name in files)
        path = str(revisions[0].snapshot_path if revisions else repo.repo_path)
        models.append(LocalModel(repo.repo_id, "hub", path, repo.size_on_disk, repo.last_accessed, names, has_weights))
    if models_dir is not None:
        models += [_of_folder(name, path) for name, path in find_models(_folder(models_dir)).items()]
    problems = [] if info is None else [str(each) for each in info.warnings]
    return sorted(models, key=lambda each: -each.last_used_s), problems


def _scan(cache_dir: str | None) -> HFCacheInfo | None:
    """None where there is no cache yet."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(cache_dir)
    except CacheNotFound:
        if cache_dir is not None:
            raise ConfigError(f"there is no hub cache {cache_dir!r}", field="cache_dir") from None
        return None
    except ValueError as error:  # the path is a file
        raise ConfigError(f"the hub's cache cannot be read: {error}", field="cache_dir") from None


def _folder(models_dir: str) -> Path:
    folder = Path(models_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--models-dir {models_dir!r} is no folder", field="models_dir")
    return folder


def _of_folder(name: str, path: Path) -> LocalModel:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    stats = [each.stat() for each in files]
    return LocalModel(
        name,
        "folder",
        str(path),
        sum(each.st_size for each in stats),
        max((each.st_atime for each in stats), default=0.0),
        has_weights=any(each.suffix in _WEIGHTS for each in files),
    )


def local_path(path: str | None) -> LocalModel:
    """A model by its path; None for the demo model."""
    if path is None:
        return _of_folder("the embedded demo model", model_folder(QuireConfig()))
    place = Path(path).expanduser()
    return _of_folder(place.name or str(place), place)


def find_local(name: str, models: Sequence[LocalModel]) -> LocalModel:
    """The model of a name.

    Raises:
        ConfigError: there is none, or the hub's cache and the folder have one each.
    """
    found = [each for each in models if each.name == name]
    if len(found) > 1:
        raise ConfigError(
            f"{name!r} is in the hub's cache and in the models' folder; give the path {found[0].path} or "
            f"{found[1].path}"
        )
    if not found:
        names = [each.name for each in models]
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else " (quire list shows what is)"
        raise ConfigError(f"{name!r} is not on this machine{hint}", field="model")
    return found[0]


def pull(name: str, revision: str | None, models_dir: str | None) -> Path:
    """Download a model of the hub; the folder or file.

    Args:
        name: On the hub, with a GGUF quantization behind a colon where it has several.
        revision: Branch, tag or commit.
        models_dir: Where to put it under its own name; None for the hub's cache.

    Raises:
        QuireError: there is no such model, or the hub cannot be reached.
    """
    if Path(name).expanduser().exists() and "/" in name:
        raise ConfigError(f"{name!r} is on this machine: there is nothing to download", field="name")
    if models_dir is None:
        return resolve_model(name, revision)
    from huggingface_hub import HfApi, snapshot_download

    folder = _folder(models_dir)
    repo, _, tag = name.partition(":")
    try:
        files = list(HfApi().list_repo_files(repo, revision=revision))
        ggufs = model_files(files)
        if tag or (ggufs and not any(each.endswith(".safetensors") for each in files)):
            first = chosen_file(repo, ggufs, tag or None)
            snapshot_download(repo, revision=revision, allow_patterns=parts_of(first, files), local_dir=folder)
            return folder / first
        target = folder / repo.rpartition("/")[2]
        snapshot_download(repo, revision=revision, allow_patterns=list(HUB_FILE_PATTERNS), local_dir=target)
        return target
    except QuireError:
        raise
    except Exception as error:  # the hub's client raises its own, httpx's and OSErrors alike
        raise CheckpointError(
            f"cannot get {name!r} from the hub: {type(error).__name__}: {error}. Check the name, the network and "
            "HF_HUB_OFFLINE (a gated model needs HF_TOKEN)"
        ) from error


class Removal:
    """What would be removed, and doing it."""

    def __init__(self, what: list[str], freed_bytes: int, run: list[Any]) -> None:
        self.what, self.freed_bytes, self._run = what, freed_bytes, run

    def execute(self) -> None:
        """Remove it.

        Raises:
            QuireError: the system does not allow it.
        """
        try:
            for each in self._run:
                each()
        except OSError as error:
            raise QuireError(f"cannot remove {error.filename or 'it'}: {error.strerror}") from None


def removal(names: Sequence[str], models_dir: str | None, cache_dir: str | None = None) -> Removal:
    """What removing models frees.

    Args:
        names: Of models; one of the hub's cache with @ and a branch, tag or the beginning of a commit behind it for
            that revision alone.
        models_dir: A folder of models; None for none.
        cache_dir: Of the hub; None for where its library looks.

    Raises:
        ConfigError: one is not there.
    """
    models, _ = list_models(models_dir, cache_dir)
    commits: list[str] = []
    what, run, freed = [], list[Any](), 0
    for name in dict.fromkeys(names):
        repo, _, revision = name.partition("@")
        model = find_local(repo, models)
        if model.place == "folder":
            if revision:
                raise ConfigError(f"{repo!r} is a folder, which has no revision {revision!r}", field="model")
            path = Path(model.path)
            what.append(f"{name}: {path}")
            freed += 0 if path.is_symlink() else model.size_bytes
            remove = path.unlink if path.is_symlink() or path.is_file() else lambda path=path: shutil.rmtree(path)
            run.append(remove)
            continue
        chosen = [each.split(" ")[0] for each in model.revisions if not revision or _is_revision(each, revision)]
        if not chosen:
            raise ConfigError(
                f"{repo!r} has no revision {revision!r} here; there are {', '.join(model.revisions)}", field="model"
            )
        what.append(f"{name}: {len(chosen)} revision{'s' if len(chosen) > 1 else ''} in the hub's cache")
        commits += chosen
    if commits:
        info = _scan(cache_dir)
        assert info is not None
        strategy = info.delete_revisions(*commits)
        freed += strategy.expected_freed_size
        run.append(strategy.execute)
    return Removal(what, freed, run)


def _is_revision(shown: str, wanted: str) -> bool:
    commit, _, refs = shown.partition(" ")
    names = refs.strip("()").split(", ")
    return commit.startswith(wanted) if len(wanted) >= 4 and commit.startswith(wanted) else wanted in names


def facts_of(model: LocalModel) -> dict[str, Any]:
    """What a model's files say of it.

    Raises:
        QuireError: they cannot be read.
    """
    folder = resolve_model(model.path)
    config = ModelConfig.from_path(folder)
    template = folder / "chat_template.jinja"
    tokenizer = _json(folder / "tokenizer_config.json")
    heads = f"{config.num_heads} heads, {config.num_kv_heads} of them with keys and values"
    defaults = {
        name: value
        for name, value in _json(folder / "generation_config.json").items()
        if name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
    }
    return {
        "name": model.name,
        "path": model.path,
        "architecture": config.architecture,
        "model_type": config.model_type,
        "parameters": num_parameters(config),
        "weights": config.quantization_method or config.dtype,
        "context": config.max_model_len,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "attention": heads,
        "vocabulary": config.vocab_size,
        "chat_template": bool(template.is_file() or tokenizer.get("chat_template")),
        "sampling_defaults": defaults,
        "size_bytes": model.size_bytes,
        "last_used": _date(model.last_used_s),
        "revisions": list(model.revisions),
    }


def chat_template_of(model: LocalModel) -> str:
    """The chat template.

    Raises:
        ConfigError: it has none.
    """
    folder = resolve_model(model.path)
    path = folder / "chat_template.jinja"
    text = (
        path.read_text(encoding="utf-8")
        if path.is_file()
        else _json(folder / "tokenizer_config.json").get("chat_template")
    )
    if not text:
        raise ConfigError(f"{model.name} has no chat template", field="template")
    return text if isinstance(text, str) else "\n".join(f"{each['name']}:\n{each['template']}" for each in text)


def _json(path: Path) -> dict[str, Any]:
    import json

    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds") if seconds else "never"


def models_as_json(models: Sequence[LocalModel]) -> list[dict[str, Any]]:
    """For programs."""
    return [{**asdict(each), "last_used": _date(each.last_used_s)} for each in models]
