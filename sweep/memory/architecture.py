"""What a config.json says of a model: its layers, what each keeps in the KV cache, how many parameters it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sweep.memory.sizes import size_of

Config: TypeAlias = Mapping[str, Any]

_MOST_LAYERS, _LARGEST = 10_000, 2**40  # beyond, a config is damaged
# Keys that may limit a request (vllm/config/model.py, `_get_and_verify_max_len`).
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip

# The biases and the extra norms of families that differ from Llama in them; others follow their config's own keys.
_QKV_BIAS = frozenset({"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"})
_HEAD_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text"})
_FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text"})
# Families whose parameter count this module has right to the last one (see docs/memory.md).
_COUNTED = frozenset(
    {
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma2",
        "gemma3_text",
        "deepseek_v2",
        "deepseek_v3",
    }
    | {"gpt_oss"}
)
# Keys of layers that keep a state instead of a cache, or share one, or have other heads in some layers: what those take
# is decided by kernels and page sizes that a config does not tell.
_UNLIKE = (
    ("linear_num_value_heads", "linear attention"),
    ("mamba_d_state", "Mamba layers"),
    ("ssm_state_size", "Mamba layers"),
    ("state_size", "Mamba layers"),
    ("conv_L_cache", "convolution layers"),
    ("num_kv_shared_layers", "layers that share a cache"),
    ("global_head_dim", "heads of several sizes"),
    ("index_topk", "sparse attention with an index of its own"),
    ("attention_chunk_size", "chunked local attention"),
    ("block_configs", "layers of several shapes"),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps of a token.

    kv_heads: heads of its keys and values before they are divided among devices; 1 for the latent of MLA, which every
    device keeps whole. elements: of one head: keys and values together, or the latent. window_tokens: how far back it
    looks, None for all tokens.
    """

    kind: Literal["full", "sliding", "mla"]
    kv_heads: int
    elements: int
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as its config.json describes it.

    attention: MHA, GQA, MQA or MLA. layers: None where `unknown` says why their cache cannot be told.
    parameters: of the language model, counted; exact says whether its family is one that is known to the last of them.
    """

    model_type: str
    attention: Literal["MHA", "GQA", "MQA", "MLA"]
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    layer_count: int
    layers: tuple[Layer, ...] | None
    unknown: str | None
    parameters: int
    exact: bool
    dtype: str
    max_len_tokens: int | None


def read_architecture(config: Config) -> Architecture:
    """Read a config.json. Raises KeyError, TypeError or ValueError where it is not that of a language model."""
    text = text_config(config)
    layer_count, heads = _whole(text["num_hidden_layers"]), _whole(text["num_attention_heads"])
    unknown = _unlike(text)
    if not 0 < layer_count <= _MOST_LAYERS:
        raise ValueError(f"a model of {layer_count} layers")
    layers = None if unknown else _layers(text, layer_count)
    if layers and any(layer.kv_heads < 1 or layer.elements < 1 for layer in layers):
        raise ValueError("heads have a size, and there is at least one")
    counted = _parameters(text, layer_count)
    return Architecture(
        model_type=str(text.get("model_type", config.get("model_type", ""))),
        attention=_attention(text, heads),
        hidden=_whole(text["hidden_size"]),
        intermediate=_widest(text),
        vocab=_whole(text["vocab_size"]),
        heads=heads,
        layer_count=layer_count,
        layers=layers,
        unknown=unknown,
        parameters=counted,
        exact=text.get("model_type") in _COUNTED and text is config,
        dtype=str(_first(text, "dtype", "torch_dtype") or _first(config, "dtype", "torch_dtype") or "float32"),
        max_len_tokens=_max_len(text),
    )


def text_config(config: Config) -> Config:
    """Return the part that describes the language model, where others stand beside it."""
    for key in ("text_config", "llm_config", "language_config"):
        nested = config.get(key)
        if isinstance(nested, Mapping) and "num_hidden_layers" in nested:
            return nested
    return config


def _first(config: Config, *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _whole(value: Any, least: int = 1) -> int:
    """Return a size as configs have them. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _LARGEST or value % 1:
        raise ValueError(f"{value!r:.50} is no size")
    return int(value)


def _max_len(text: Config) -> int | None:
    """Return the longest request, as far as the config tells: of several keys vLLM takes the one that allows least."""
    told = [size for key in _LENGTHS if (size := size_of(text.get(key))) is not None]
    return min(told, default=None)


def _is_mla(text: Config) -> bool:
    return text.get("kv_lora_rank") is not None


def _attention(text: Config, heads: int) -> Literal["MHA", "GQA", "MQA", "MLA"]:
    if _is_mla(text):
        return "MLA"
    kv_heads = _kv_heads(text)
    return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"


def _kv_heads(text: Config) -> int:
    if text.get("multi_query"):
        return 1
    return _whole(_first(text, "num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_heads"))


def _head_dim(text: Config) -> int:
    if text.get("head_dim") is not None:
        return _whole(text["head_dim"])
    return _whole(text["hidden_size"]) // _whole(text["num_attention_heads"])


def _unlike(text: Config) -> str | None:
    for key, words in _UNLIKE:
        if text.get(key):
            return f"it has {words}"
    pattern = text.get("sliding_window_pattern")
    if text.get("sliding_window") and pattern is not None and not isinstance(pattern, int):
        return "it has windows in a pattern of its own"
    kinds = {str(kind) for kind in text.get("layer_types") or ()} - {"full_attention", "sliding_attention"}
    return f"it has layers of the kind {min(kinds)!r}" if kinds else None


def _layers(text: Config, count: int) -> tuple[Layer, ...]:
    if _is_mla(text):
        latent = _whole(text["kv_lora_rank"]) + _whole(text["qk_rope_head_dim"])
        return (Layer("mla", 1, latent),) * count
    kv_heads, elements = _kv_heads(text), 2 * _head_dim(text)
    window = text.get("sliding_window")
    return tuple(
        Layer("sliding", kv_heads, elements, _whole(window)) if slides and window else Layer("full", kv_heads, elements)
        for slides in _sliding(text, count)
    )


def _sliding(text: Config, count: int) -> list[bool]:
    """Return which layers look back over a window only, as vLLM 0.32 reads it."""
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return [False] * count
    if types := text.get("layer_types"):
        if len(types) != count:
            raise ValueError(f"layer_types names {len(types)} layers of {count}")
        return [kind == "sliding_attention" for kind in types]
    # Configs older than layer_types: every second layer of Gemma 2, all but each sixth of Gemma 3.
    pattern = _first(text, "sliding_window_pattern", "_sliding_window_pattern")
    if pattern is None:
        pattern = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6}.get(str(text.get("model_type")))
    if isinstance(pattern, int) and pattern > 1:
        return [(i + 1) % pattern != 0 for i in range(count)]
    # Qwen2 names the layers below which all is full attention; what has no pattern slides everywhere (Mistral).
    full_below = _whole(text.get("max_window_layers") or 0, least=0) if text.get("use_sliding_window") else 0
    return [i >= full_below for i in range(count)]


def _widest(text: Config) -> int:
    """Return the widest MLP that one token passes through: of a mixture, all the experts that it is sent to."""
    dense = _dense(text)
    chosen = _first(text, "num_experts_per_tok", "experts_per_token")
    if not chosen:
        return dense
    return max(dense, _whole(text.get("moe_intermediate_size") or dense) * _whole(chosen))


def _dense(text: Config) -> int:
    width = _first(text, "intermediate_size", "ffn_hidden_size", "n_inner")
    return 4 * _whole(text["hidden_size"]) if width is None else _whole(width)


def _parameters(text: Config, count: int) -> int:
    """Count the parameters of the language model, its input and output embeddings among them."""
    hidden, family = _whole(text["hidden_size"]), str(text.get("model_type"))
    embeddings = _whole(text["vocab_size"]) * hidden * (1 if _tied(text, family) else 2)
    norms = (4 if family in _FOUR_NORMS else 2) * hidden
    attention = _mla_parameters(text) if _is_mla(text) else _attention_parameters(text, family)
    mlps = sum(_mlp_parameters(text, family, layer) for layer in range(count))
    return embeddings + hidden + count * (attention + norms) + mlps


def _tied(text: Config, family: str) -> bool:
    # Gemma's configs leave it out: its class has it on.
    return bool(text.get("tie_word_embeddings", family.startswith("gemma")))


def _attention_parameters(text: Config, family: str) -> int:
    hidden, heads, dim = _whole(text["hidden_size"]), _whole(text["num_attention_heads"]), _head_dim(text)
    queries, keys = heads * dim, _kv_heads(text) * dim
    total = 2 * hidden * queries + 2 * hidden * keys
    if family in _QKV_BIAS or text.get("attention_bias"):
        total += queries + 2 * keys
    if text.get("attention_bias"):
        total += hidden
    if family in _HEAD_NORMS:
        total += 2 * dim
    if family == "gpt_oss":
        total += heads  # the sinks
    return total


def _mla_parameters(text: Config) -> int:
    hidden, heads = _whole(text["hidden_size"]), _whole(text["num_attention_heads"])
    latent, rope = _whole(text["kv_lora_rank"]), _whole(text["qk_rope_head_dim"])
    nope, value = _whole(text["qk_nope_head_dim"]), _whole(text["v_head_dim"])
    rank = _whole(text["q_lora_rank"]) if text.get("q_lora_rank") else 0
    queries = heads * (nope + rope)
    asked = hidden * rank + rank + rank * queries if rank else hidden * queries
    kept = hidden * (latent + rope) + latent + latent * heads * (nope + value)
    return asked + kept + heads * value * hidden


def _mlp_parameters(text: Config, family: str, layer: int) -> int:
    hidden = _whole(text["hidden_size"])
    dense = 3 * hidden * _dense(text)
    experts = _first(text, "num_local_experts", "n_routed_experts", "num_experts")
    if not experts or layer < _whole(text.get("first_k_dense_replace") or 0, least=0):
        return dense
    width = _whole(text.get("moe_intermediate_size") or text["intermediate_size"])
    one = 3 * hidden * width
    total = _whole(experts) * (one + hidden) + _whole(text.get("n_shared_experts") or 0, least=0) * one
    if text.get("topk_method") == "noaux_tc":
        total += _whole(experts)  # the correction that balances the experts
    if family == "gpt_oss":
        total += _whole(experts) * (2 * width + hidden + 1)  # biases of experts and router
    return total
