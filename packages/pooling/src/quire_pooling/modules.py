"""The modules of sentence-transformers that a checkpoint's modules.json lists, as parts of a pooler. Free of torch.

A module gets the vectors of all tokens until a pooling module, and the vector of the text from there on. Tensors are
named FOLDER/NAME, by the module's folder and their name in its file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from quire_interfaces import CheckpointError, Fields, read_json
from quire_pooling.spec import (
    Activation,
    ActivationSpec,
    DenseSpec,
    LayerNormSpec,
    NormalizeSpec,
    PoolingHeadSpec,
    PoolingMethod,
)

__all__ = ["Module", "ModuleChain", "activation_of", "read_chain", "read_modules"]

Step = DenseSpec | LayerNormSpec | ActivationSpec | NormalizeSpec
_METHODS: dict[str, PoolingMethod] = {
    "cls": "CLS",
    "max": "MAX",
    "mean": "MEAN",
    "mean_sqrt_len_tokens": "MEAN_SQRT_LEN",
    "weightedmean": "WEIGHTEDMEAN",
    "lasttoken": "LAST",
}
"""Pooling mode of sentence-transformers -> method, in the order in which vectors are put one behind the other."""
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Field of an older 1_Pooling/config.json -> pooling mode, in the same order."""
_ACTIVATIONS: dict[str, Activation] = {
    "Identity": "identity",
    "ReLU": "relu",
    "SiLU": "silu",
    "GELU": "gelu_erf",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Softmax": "softmax",
}
"""Last part of the name of a class of torch -> the function that it is with its defaults."""


class Module(NamedTuple):
    """An entry of modules.json."""

    kind: str
    """Last part of its class's name: "Transformer", "Pooling", "Dense", ..."""
    class_name: str
    path: str
    """Its folder below the checkpoint's; empty for that itself."""


@dataclass(slots=True)
class ModuleChain:
    """What the modules behind the network do, put together one by one."""

    folder: Path
    """The checkpoint's."""
    width: int
    """Numbers of the vectors that the next module gets."""
    lm_head: str | None = None
    """Name of the tensor of the network's LM head; None where it has none."""
    token_steps: list[Step] = field(default_factory=list)
    methods: tuple[PoolingMethod, ...] = ()
    steps: list[Step] = field(default_factory=list)
    include_prompt: bool = True
    gives_scores: bool = False
    """The output is logits of classes, not an embedding."""
    has_skiplist: bool = False
    skiplist_words: tuple[str, ...] = ()

    @property
    def current(self) -> list[Step]:
        """The layers that the next module is one of."""
        return self.steps if self.methods else self.token_steps

    def head(self) -> PoolingHeadSpec:
        """The layers behind the pooling method, or of tokens where there is none."""
        return PoolingHeadSpec(steps=tuple(self.steps if self.methods else self.token_steps))


def read_modules(folder: Path) -> list[Module]:
    """The entries of modules.json in their order; empty where the checkpoint has no such file.

    Raises:
        CheckpointError: The file is not understood, or a folder is outside of the checkpoint's.
    """
    path = folder / "modules.json"
    if not path.exists():
        return []
    entries = read_json_list(path)
    modules = []
    for number, entry in enumerate(entries):
        fields = Fields(entry, f"{path}, entry {number}")
        class_name, place = fields.text("type"), fields.text("path", default="").rstrip("/")
        parts = PurePosixPath(place).parts
        if place.startswith("/") or ".." in parts or "\\" in place:
            raise CheckpointError(f"{path}: path {place!r} is outside of the checkpoint's folder")
        modules.append(Module(class_name.rpartition(".")[2], class_name, place))
    if not modules or not modules[0].kind.endswith("Transformer"):
        first = modules[0].class_name if modules else "nothing"
        raise CheckpointError(f"{path}: the first module must be a Transformer, is {first}, which is not supported")
    return modules


def read_json_list(path: Path) -> list[Any]:
    """The JSON list in a file.

    Raises:
        CheckpointError: Not readable, not JSON, or not a list.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download the file again") from error
    if not isinstance(entries, list):
        raise CheckpointError(f"{path} must hold a list, holds {type(entries).__name__}")
    return entries


def read_chain(folder: Path, modules: list[Module], hidden_size: int, lm_head: str | None) -> ModuleChain:
    """What the modules behind the first one, the network, do.

    Args:
        folder: The checkpoint's.
        modules: As `read_modules` gives them.
        hidden_size: Width of the network's hidden states.
        lm_head: Name of the tensor of its LM head; None where it has none.

    Raises:
        CheckpointError: A module is not supported or its configuration is wrong; the message names it.
    """
    chain = ModuleChain(folder, hidden_size, lm_head)
    for module in modules[1:]:
        reader = _READERS.get(module.kind)
        if reader is None:
            choices = ", ".join(sorted(_READERS))
            raise CheckpointError(
                f"{folder / 'modules.json'}: module {module.class_name} is not supported; supported: {choices}"
            )
        reader(chain, module, _config(folder, module))
    return chain


def activation_of(class_name: str, source: str) -> Activation:
    """The function that a class of torch is, such as "torch.nn.modules.activation.Tanh".

    Raises:
        CheckpointError: It is not one of torch, or not known.
    """
    name = class_name.rpartition(".")[2]
    if not class_name.startswith("torch.") or name not in _ACTIVATIONS:
        choices = ", ".join(_ACTIVATIONS)
        raise CheckpointError(
            f"{source}: activation {class_name!r} is not supported; supported, of torch.nn: {choices}"
        )
    return _ACTIVATIONS[name]


def _config(folder: Path, module: Module) -> Fields:
    path = folder / module.path / "config.json"
    has_file = module.path and path.exists()
    return Fields(read_json(path) if has_file else {}, str(path))


def _pooling(chain: ModuleChain, module: Module, config: Fields) -> None:
    if chain.methods:
        raise CheckpointError(f"{config.source}: there are two pooling modules, which is not supported")
    names = ("embedding_dimension", "word_embedding_dimension")
    width = next((config.integer(name, minimum=1) for name in names if config.get(name) is not None), chain.width)
    if width != chain.width:
        raise CheckpointError(f"{config.source}: the module pools vectors of {width} numbers, and gets {chain.width}")
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if config.flag(flag, default=False)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    for mode in modes:
        if mode not in _METHODS:
            raise CheckpointError(f"{config.source}: pooling mode {mode!r} is unknown; known: {', '.join(_METHODS)}")
    chain.include_prompt = config.flag("include_prompt", default=True)
    chain.methods = tuple(_METHODS[mode] for mode in modes)
    chain.width *= len(modes)


def _dense(chain: ModuleChain, module: Module, config: Fields) -> None:
    is_of_pylate = module.class_name.startswith("pylate.")
    place = "token_embeddings" if is_of_pylate else config.text("module_input_name", default="sentence_embedding")
    expected = "sentence_embedding" if chain.methods else "token_embeddings"
    if place != expected:
        raise CheckpointError(f"{config.source}: the layer reads {place}, and gets {expected}; this is not supported")
    output = config.text("module_output_name", default=None)
    chain.gives_scores |= output == "scores"
    if output not in (None, place, "scores"):
        raise CheckpointError(f"{config.source}: module_output_name {output!r} is not supported")
    in_features, out_features = config.integer("in_features", minimum=1), config.integer("out_features", minimum=1)
    if in_features != chain.width:
        raise CheckpointError(f"{config.source}: in_features is {in_features}, and vectors have {chain.width} numbers")
    default = "torch.nn.Identity" if is_of_pylate else "torch.nn.Tanh"
    use_residual = config.flag("use_residual", default=False)
    chain.current.append(
        DenseSpec(
            weight=f"{module.path}/linear.weight",
            bias=f"{module.path}/linear.bias" if config.flag("bias", default=True) else None,
            in_features=in_features,
            out_features=out_features,
            activation=activation_of(config.text("activation_function", default=default), config.source),
            use_residual=use_residual,
            residual=f"{module.path}/residual.weight" if use_residual and in_features != out_features else None,
        )
    )
    chain.width = out_features


def _layer_norm(chain: ModuleChain, module: Module, config: Fields) -> None:
    if not chain.methods:
        raise CheckpointError(f"{config.source}: a layer norm before a pooling module is not supported")
    size = config.integer("dimension", minimum=1)
    if size != chain.width:
        raise CheckpointError(f"{config.source}: dimension is {size}, and vectors have {chain.width} numbers")
    name = f"{module.path}/norm"
    chain.steps.append(LayerNormSpec(weight=f"{name}.weight", bias=f"{name}.bias", size=size, eps=1e-5))


def _normalize(chain: ModuleChain, module: Module, config: Fields) -> None:
    place = config.text("module_input_name", default="sentence_embedding")
    if place == ("sentence_embedding" if chain.methods else "token_embeddings"):
        chain.current.append(NormalizeSpec())


def _splade(chain: ModuleChain, module: Module, config: Fields) -> None:
    strategy = config.text("pooling_strategy", default="max")
    function = config.text("activation_function", default="relu")
    if strategy not in ("max", "sum") or function not in ("relu", "log1p_relu"):
        raise CheckpointError(f"{config.source}: pooling {strategy!r} of {function!r} is not supported")
    # What sentence-transformers calls relu is log1p(relu(x)), and log1p_relu one more log1p of that.
    chain.token_steps.append(ActivationSpec(activation="log1p_relu" if function == "relu" else "log1p_log1p_relu"))
    chain.methods = ("MAX",) if strategy == "max" else ("SUM",)


def _logit_score(chain: ModuleChain, module: Module, config: Fields) -> None:
    if chain.lm_head is None:
        raise CheckpointError(f"{config.source}: scores are logits of tokens, and the network has no LM head")
    true, false = config.integer("true_token_id", minimum=0), config.integer("false_token_id", default=None, minimum=0)
    chain.methods = ("LAST",)
    chain.gives_scores = True
    chain.steps.append(
        DenseSpec(
            weight=chain.lm_head,
            in_features=chain.width,
            out_features=1,
            rows=(true,),
            minus_rows=() if false is None else (false,),
        )
    )
    chain.width = 1


def _multi_vector_mask(chain: ModuleChain, module: Module, config: Fields) -> None:
    config.fixed("keep_only_token_ids")
    tasks = config.get("skiplist_tasks")
    if tasks not in (None, "document", ["document"]):
        raise CheckpointError(f"{config.source}: skiplist_tasks {tasks!r} is not supported; supported: document")
    chain.has_skiplist = True
    chain.skiplist_words = config.texts("skiplist_words")


def _nothing(chain: ModuleChain, module: Module, config: Fields) -> None:
    """A module that is of training only."""


_READERS: dict[str, Callable[[ModuleChain, Module, Fields], None]] = {
    "Pooling": _pooling,
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": _normalize,
    "Dropout": _nothing,
    "SpladePooling": _splade,
    "LogitScore": _logit_score,
    "MultiVectorMask": _multi_vector_mask,
}
"""Kind of a module -> what reads it into the chain."""


def without_last_normalize(head: PoolingHeadSpec) -> tuple[PoolingHeadSpec, bool]:
    """A head without the normalization at its end, which goes behind a cut to fewer dimensions; and whether it had
    one."""
    if head.steps and isinstance(head.steps[-1], NormalizeSpec):
        return dataclasses.replace(head, steps=head.steps[:-1]), True
    return head, False
