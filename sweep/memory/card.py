"""A model's card: what its files on this machine say of the memory that it takes. No network, no weights are read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sweep.memory.architecture import Architecture, read_architecture, text_config
from sweep.memory.json_file import UNREADABLE, read_object
from sweep.memory.sizes import number_of
from sweep.memory.weights import ELEMENT_BYTES, Weights, read_weights

_MOST_BITS = 64
_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What is known of a model before it is loaded.

    weight_bytes: on disk. weights_from: "files" (exact), "architecture" (computed from the config).
    elements: stored numbers by type of safetensors, where the files' headers are there.
    quantization: the method that the config names.
    """

    model: str
    architecture: Architecture
    weight_bytes: int
    weights_from: Literal["files", "architecture"]
    elements: dict[str, int] | None
    quantization: str | None

    @property
    def parameters(self) -> int:
        """How many parameters it has; of packed quantized weights, what the config says."""
        if self.elements is not None and self.quantization is None:
            return sum(self.elements.values())
        return self.architecture.parameters

    def dtype_bytes(self, dtype: object = "auto") -> int:
        """Return the size of one number of the model, as vLLM chooses it.

        With auto a model of 32-bit floats runs in 16 bits (vllm/config/model.py, `_resolve_auto_dtype`).
        """
        name = str(dtype or "auto")
        if name == "auto":
            return 2
        return _DTYPE_BYTES.get(name, 2)

    def loaded_bytes(self, dtype: object = "auto") -> int:
        """Return what the weights take when they are loaded: floats are cast to the model's type, the rest is kept."""
        size = self.dtype_bytes(dtype)
        if self.elements is None or self.quantization is not None:
            stored = _DTYPE_BYTES.get(self.architecture.dtype, 2) if self.quantization is None else size
            return self.weight_bytes * size // stored
        return int(
            sum(
                n * (size if kind in {"F32", "F16", "BF16"} else ELEMENT_BYTES[kind])
                for kind, n in self.elements.items()
            )
        )

    def least_bytes(self, dtype: object = "auto") -> int:
        """Return the least that the language model itself takes of what its files hold.

        Some hold more than is loaded: an output embedding that is tied, layers that predict a second token, a part that
        sees images. What the config's own sizes make up is loaded in any case.
        """
        loaded = self.loaded_bytes(dtype)
        if self.quantization is not None:
            return loaded
        return min(loaded, self.architecture.parameters * self.dtype_bytes(dtype))


def read_card(model: str, revision: str | None = None, env: Mapping[str, str] | None = None) -> ModelCard | None:
    """Return the card of a model in a folder or in the Hugging Face cache; None where it is not on this machine.

    env: the environment of the server, over that of this process; HF_HUB_CACHE and HF_HOME say where the cache is.
    """
    try:
        folder = find(model, revision, {**os.environ, **(env or {})})
        if folder is None:
            return None
        return card_of(model, read_object(folder / "config.json"), read_weights(folder))
    except UNREADABLE:
        return None


def card_of(model: str, config: Mapping[str, Any], weights: Weights | None = None) -> ModelCard:
    """Return the card that a config.json and what is known of the weights make.

    Raises one of UNREADABLE where the config is not that of a language model.
    """
    architecture = read_architecture(config)
    quantization = _quantization(config)
    if weights is not None:
        return ModelCard(model, architecture, weights.file_bytes, "files", weights.elements, quantization)
    size = _stored_bytes(config, architecture)
    return ModelCard(model, architecture, int(architecture.parameters * size), "architecture", None, quantization)


def find(model: str, revision: str | None, env: Mapping[str, str]) -> Path | None:
    """Return the folder of a model's files, or None. Raises one of UNREADABLE where it cannot be looked for."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if model.count("/") > 1 or model.startswith((".", "/", "~")):
        return None
    home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()
    stored = cache / f"models--{model.replace('/', '--')}"
    name = revision or "main"
    with contextlib.suppress(OSError):  # a commit is its own name
        name = (stored / "refs" / name).read_text(encoding="utf-8").strip()
    snapshot = stored / "snapshots" / name
    return snapshot if (snapshot / "config.json").is_file() else None


def _quantization(config: Mapping[str, Any]) -> str | None:
    told = _quantized(config)
    return None if told is None else str(told.get("quant_method", "unknown"))


def _quantized(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    parts = (config, text_config(config))
    told = [part.get(key) for part in parts for key in ("quantization_config", "compression_config")]
    return next((entry for entry in told if isinstance(entry, Mapping)), None)


def _stored_bytes(config: Mapping[str, Any], architecture: Architecture) -> float:
    """Return the bytes of one parameter, roughly where weights are quantized: scales and layers left alone vary."""
    told = _quantized(config)
    if told is None:
        return _DTYPE_BYTES.get(architecture.dtype, 2)
    if (bits := number_of(told.get("bits"))) is not None:
        if not 0 < bits <= _MOST_BITS:
            raise ValueError(f"weights of {bits:g} bits")
        return bits / 8 + 0.06
    return {"fp8": 1.0, "mxfp4": 0.66, "awq": 0.56, "gptq": 0.56}.get(str(told.get("quant_method")), 1.0)
