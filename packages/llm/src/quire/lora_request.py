"""`LoRARequest`: the adapter that a request of the Python API runs with."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from quire_interfaces import RequestError

__all__ = ["LoRAChoice", "LoRARequest"]


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by name and place, with vLLM's fields in vLLM's order.

    An adapter is read when its name is new, when `lora_path` or `lora_int_id` is another one than before, and when
    `load_inplace` asks for it; requests that began with the former one keep that.

    Raises:
        RequestError: no name, no path, or an id that is no whole number above 0.
    """

    lora_name: str
    lora_int_id: int = 1
    """Another number under the same name means another adapter."""
    lora_path: str = ""
    """Its folder, or its hub name."""
    base_model_name: str | None = None
    """For the caller's own use."""
    _: KW_ONLY
    load_inplace: bool = False
    """Read the files again, which may have changed."""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if name == "lora_path" and hasattr(value, "__fspath__"):
                value = str(value)
                object.__setattr__(self, name, value)
            if not isinstance(value, str) or not value:
                raise RequestError(f"{name} must be a non-empty text, got {value!r}", param=name)
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise RequestError(
                f"lora_int_id must be a whole number above 0, got {self.lora_int_id!r}; the order is "
                "LoRARequest(lora_name, lora_int_id, lora_path)",
                param="lora_int_id",
            )

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path


LoRAChoice = LoRARequest | str | None
"""An adapter to load if need be, the name of one that is loaded, or the network as it is."""
