"""What a prefix cache could have served, by the prompts that were sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sweep.model import RequestRecord

# Of vLLM's KV cache on GPUs, in tokens; only whole blocks can be served.
_DEFAULT_BLOCK_TOKENS = 16


def block_tokens(cache_config: Mapping[str, str]) -> int:
    """Return the size of a block, as the labels of vllm:cache_config_info tell it."""
    size = cache_config.get("block_size", "")
    return int(size) if size.isdecimal() and int(size) > 0 else _DEFAULT_BLOCK_TOKENS


def is_cached(cache_config: Mapping[str, str]) -> bool:
    """Tell whether prefix caching is on, as far as the server says."""
    return cache_config.get("enable_prefix_caching", "True") != "False"


def offered_frac(records: Iterable[RequestRecord]) -> float | None:
    """Return the share of the counted prompt tokens that earlier requests of the run had already brought."""
    offered = total = 0
    for record, tokens in _repeated(records):
        if record.counted:
            offered += tokens
            total += record.prompt_tokens
    return offered / total if total else None


def expected_hits(records: Iterable[RequestRecord], block: int) -> tuple[int, int]:
    """Return how many prompt tokens a cache of such blocks can have served, and how many were sent, of all records."""
    hits = sent = 0
    for record, tokens in _repeated(records):
        if record.t_send_ns is not None:
            hits += tokens // block * block
            sent += record.prompt_tokens
    return hits, sent


def _repeated(records: Iterable[RequestRecord]) -> Iterator[tuple[RequestRecord, int]]:
    """Yield each record in the order of its start, with the tokens at its beginning that an earlier one brought."""
    seen: set[int] = set()
    for record in sorted(records, key=lambda r: r.t_start_ns):
        shared = record.prefix_tokens if record.prefix_group in seen else 0
        yield record, min(record.prompt_tokens, max(shared, record.history_tokens))
        if record.prefix_group is not None:
            seen.add(record.prefix_group)
