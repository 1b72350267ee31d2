"""Whether the model is there, or can be had from the hub. The token of the hub is used and never shown."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from sweep.run.doctor_line import Check, failure, ok, warning

_TIMEOUT_S = 5.0
_LONGEST_HEADER = 100_000_000  # as safetensors itself has it
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})

Place: TypeAlias = Literal["folder", "no folder", "cached", "partly cached", "not cached", "elsewhere"]

_THERE: dict[Place, str] = {"folder": "on this machine", "cached": "in the cache"}


@dataclass(frozen=True, slots=True)
class Model:
    """place: where its files are. offline: the environment forbids to ask the hub. token: whether there is one.

    answer: the hub's HTTP status, or why it could not be asked; None where it was not. damage: what its files lack.
    endpoint: whether HF_ENDPOINT names another hub. folder: whether a flag names the folder that models are kept in.
    """

    name: str
    place: Place
    offline: bool
    token: bool
    answer: int | str | None = None
    damage: str | None = None
    endpoint: bool = False
    folder: bool = False


def find_model(name: str, revision: str | None, env: Mapping[str, str], cache: Path) -> Model:
    """Look for a model's files, and ask the hub about it only where they are not there."""
    place, folder = _place(name, revision, env, cache)
    offline = any(env.get(key, "").upper() in _TRUE for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    token = _token(env)
    ask = place in {"not cached", "partly cached"} and not offline
    answer = _ask_hub(name, revision, env, token) if ask else None
    damage = _damage(folder) if folder else None
    named = cache != hub_cache(env)
    return Model(name, place, offline, token is not None, answer, damage, bool(env.get("HF_ENDPOINT")), named)


def hub_cache(env: Mapping[str, str]) -> Path:
    """Return the folder that models are downloaded to, as huggingface_hub finds it."""
    named = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")
    return home_path(named) if named else _hub_home(env) / "hub"


def _hub_home(env: Mapping[str, str]) -> Path:
    caches = env.get("XDG_CACHE_HOME") or "~/.cache"
    return home_path(env.get("HF_HOME") or f"{caches}/huggingface")


def home_path(path: str) -> Path:
    """Write a home out as huggingface_hub and vLLM do: where there is none, the path stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  (Path.expanduser raises there)


def _place(name: str, revision: str | None, env: Mapping[str, str], cache: Path) -> tuple[Place, Path | None]:
    """Return where a model is, and the folder that holds all of it, if there is one."""
    path = home_path(name)
    if path.is_dir():
        whole = (path / "config.json").is_file() and _has_weights(path)
        return ("folder", path) if whole else ("no folder", None)
    if path.is_file():  # one file that holds everything
        return "folder", None
    if ":" not in name and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        return "no folder", None
    if ":" in name or env.get("VLLM_USE_MODELSCOPE", "").upper() in _TRUE:
        return "elsewhere", None
    kept = cache / f"models--{name.replace('/', '--')}"
    snapshot = kept / "snapshots" / _commit(kept, revision or "main")
    if not (snapshot / "config.json").is_file():
        return "not cached", None
    unfinished = any(kept.glob("blobs/*.incomplete"))
    return ("partly cached", None) if unfinished or not _has_weights(snapshot) else ("cached", snapshot)


def _commit(kept: Path, revision: str) -> str:
    try:
        return (kept / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        return revision  # a commit's own name


def _has_weights(folder: Path) -> bool:
    return any(path.exists() for pattern in _WEIGHTS for path in folder.glob(pattern))


def _damage(folder: Path) -> str | None:
    """Return which of a model's files cannot be what they should be."""
    name = "config.json"
    try:
        config = json.loads((folder / name).read_bytes())
        if not isinstance(config, dict):
            return f"{name} holds no settings"
        for index in folder.glob("*.safetensors.index.json"):
            name = index.name
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
            if missing := sorted(shard for shard in shards if not (folder / shard).exists()):
                return f"{missing[0]} is missing, which {name} names"
        for weights in folder.glob("*.safetensors"):
            name = weights.name
            if weights.stat().st_size < _safetensors_bytes(weights):
                return f"{name} is cut off"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{name} cannot be read"
    return None


def _safetensors_bytes(path: Path) -> int:
    """Return how long the file has to be: eight bytes, a header of the length that they tell, and the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("no header")
        tensors = json.loads(file.read(length))
    ends = [tensor["data_offsets"][1] for key, tensor in tensors.items() if key != "__metadata__"]
    return int(8 + length + max(ends, default=0))


def _token(env: Mapping[str, str]) -> str | None:
    named = env.get("HF_TOKEN") or env.get("HUGGING_FACE_HUB_TOKEN")
    if named:
        return named.strip()
    try:
        kept = home_path(env.get("HF_TOKEN_PATH") or str(_hub_home(env) / "token"))
        return kept.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect means that the file is there; the token must not follow it to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _ask_hub(name: str, revision: str | None, env: Mapping[str, str], token: str | None) -> int | str:
    """Ask for the one file that every model has, without loading it: gated ones answer as they will to vLLM."""
    root = (env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not root.startswith(("http://", "https://")):
        return "HF_ENDPOINT is not an http address"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(  # noqa: S310 - checked above
        f"{root}/{name}/resolve/{revision or 'main'}/config.json", headers=headers, method="HEAD"
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_TIMEOUT_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return getattr(reason, "strerror", None) or type(reason).__name__


def check_model(model: Model) -> list[Check]:
    if model.damage:
        return failure("model", f"{model.name}: {model.damage}", "Download the model again.")
    if model.place in _THERE:
        return ok("model", f"{model.name} is {_THERE[model.place]}")
    if model.place == "no folder":
        return failure(
            "model",
            f"{model.name} is not a folder with a config.json and weights",
            "Correct serve.model. (`make sweep` makes the model of the quickstart.)",
        )
    if model.place == "elsewhere":
        return warning("model", f"{model.name} is not looked for", "See by hand that vLLM can load it from there.")
    cache = "the folder that download-dir names" if model.folder else "the cache"
    kept = f"not in {cache}" if model.place == "not cached" else f"in {cache} only in part"
    if model.offline:
        return failure(
            "model",
            f"{model.name} is {kept}, and HF_HUB_OFFLINE forbids to download it",
            "Unset HF_HUB_OFFLINE for a first download, "
            + ("or correct download-dir." if model.folder else "or name a folder that holds the model."),
        )
    return _hub_line(model, f"{model.name} is {kept}")


def _hub_line(model: Model, seen: str) -> list[Check]:
    token = "with the token that is set" if model.token else "without a token (HF_TOKEN is not set)"
    answer = model.answer
    if isinstance(answer, str):
        remedy = "Correct or unset HF_ENDPOINT" if model.endpoint else "See to the network"
        place = " into the folder that download-dir names (--cache-dir)" if model.folder else ""
        return warning(
            "model",
            f"{seen}; the hub cannot be reached: {answer}",
            f"{remedy}, or download the model beforehand, with `hf download`{place}.",
        )
    if answer in {401, 403}:
        return failure(
            "model",
            f"{seen}, and the hub refuses it {token}",
            "See that the name is right, ask for access on the model's page, and export HF_TOKEN.",
        )
    if answer == 404:
        where = ", or HF_ENDPOINT" if model.endpoint else ""
        return failure(
            "model",
            f"{seen}, and the hub knows no such model or revision",
            f"Correct serve.model or serve.revision{where}.",
        )
    if answer is None or answer >= 400:
        return warning("model", f"{seen}; the hub answered HTTP {answer}", "Try again before the night.")
    return ok("model", f"{seen}; the hub gives it {token}, and the first launch downloads it")
