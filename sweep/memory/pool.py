"""How vLLM cuts the KV cache: pages of layers, blocks of groups of layers, blocks that one request needs.

After vllm/v1/kv_cache_interface.py and vllm/v1/core/kv_cache_utils.py of 0.32.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from sweep.memory.architecture import Layer
from sweep.memory.card import ModelCard
from sweep.memory.sizes import flag_size
from sweep.model import Flags

TENSOR, PIPELINE = "tensor-parallel-size", "pipeline-parallel-size"
_CONTEXT_PARALLEL = ("decode-context-parallel-size", "prefill-context-parallel-size")  # these divide a request
_GPU_BLOCK_TOKENS = 16
_KV_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2, "half": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV cache of one device.

    block_bytes: one block of the largest group, all its layers; blocks of all groups come from one pool and have this
    size. windows: of each group of layers, how far back it looks; None for all tokens.
    """

    block_tokens: int
    block_bytes: int
    windows: tuple[int | None, ...]
    token_bytes: int  # what one token takes in all layers, as long as no window is full

    def request_blocks(self, length_tokens: int, in_flight_tokens: int) -> int:
        """Return the blocks that one request of this length needs, in all groups together.

        in_flight_tokens: what may be scheduled at once before a window's old blocks are given back.
        """
        blocks = 0
        for window in self.windows:
            held = length_tokens if window is None else min(window - 1 + in_flight_tokens, length_tokens)
            # A window need not begin where a block does.
            blocks += math.ceil(held / self.block_tokens) + (window is not None)
        return blocks

    def request_bytes(self, length_tokens: int, in_flight_tokens: int) -> int:
        """Return what vLLM wants to find before it starts: one request of this length."""
        return self.block_bytes * self.request_blocks(length_tokens, in_flight_tokens)

    def capacity(self, kv_bytes: int, length_tokens: int, in_flight_tokens: int) -> tuple[int, float]:
        """Return the tokens and the concurrency that vLLM logs for a cache of this size."""
        blocks = max(0, kv_bytes) // self.block_bytes
        concurrency = blocks / self.request_blocks(length_tokens, in_flight_tokens)
        return int(concurrency * length_tokens), concurrency


def pool_of(card: ModelCard, flags: Flags, *, block_tokens: int = _GPU_BLOCK_TOKENS) -> Pool | None:
    """Return how these flags cut the cache of one device; None where that is not known.

    block_tokens: where the flags do not say.
    """
    layers, size = card.architecture.layers, _element_bytes(card, flags)
    tensor, pipeline = flag_size(flags, TENSOR, 1), flag_size(flags, PIPELINE, 1)
    tokens = flag_size(flags, "block-size", block_tokens)
    if layers is None or size is None or tensor is None or pipeline is None or tokens is None:
        return None
    if any(flag_size(flags, name, 1) != 1 for name in _CONTEXT_PARALLEL):
        return None
    kinds = Counter(_as_served(layer, layers, flags) for layer in layers)
    pages = {kind: tokens * max(1, kind.kv_heads // tensor) * kind.elements * size for kind in kinds}
    if len(set(pages.values())) > 1:
        return None
    # Layers of two kinds share a pool: groups of as many layers as the rarer kind has, unless they are nearly as many.
    fewest, most = min(kinds.values()), max(kinds.values())
    per_group = most if most < 1.5 * fewest else fewest
    page = next(iter(pages.values()))
    windows = [kind.window_tokens for kind, count in kinds.items() for _ in range(math.ceil(count / per_group))]
    staged = math.ceil(per_group / pipeline)
    return Pool(tokens, page * staged, tuple(windows), page // tokens * math.ceil(len(layers) / pipeline))


def _as_served(layer: Layer, layers: tuple[Layer, ...], flags: Flags) -> Layer:
    mixed = any(other.kind != layer.kind for other in layers)
    plain = flags.get("disable-sliding-window") or (mixed and flags.get("disable-hybrid-kv-cache-manager"))
    return Layer("full", layer.kv_heads, layer.elements) if layer.kind == "sliding" and plain else layer


def _element_bytes(card: ModelCard, flags: Flags) -> int | None:
    name = str(flags.get("kv-cache-dtype") or "auto")
    return card.dtype_bytes(flags.get("dtype")) if name == "auto" else _KV_BYTES.get(name)
