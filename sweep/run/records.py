"""Keeps a trial's requests: their stamps and counts, never their texts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sweep.model import RequestRecord

_PLAIN = (
    ("request_id", pa.string()),
    ("counted", pa.bool_()),
    ("t_sched_ns", pa.int64()),
    ("t_start_ns", pa.int64()),
    ("t_send_ns", pa.int64()),
    ("t_headers_ns", pa.int64()),
    ("t_end_ns", pa.int64()),
    ("prompt_tokens", pa.int32()),
    ("prefix_group", pa.int32()),
    ("requested_tokens", pa.int32()),
    ("output_tokens", pa.int32()),
    ("status", pa.string()),
    ("finish_reason", pa.string()),
    ("error", pa.string()),
    ("token_count", pa.string()),
    ("kind", pa.string()),
    ("turn", pa.int32()),
    ("prefix_tokens", pa.int32()),
    ("history_tokens", pa.int32()),
    ("answer_ns", pa.int64()),
    ("late_events", pa.int32()),
)


def write_requests(path: Path, records: Iterable[tuple[str, RequestRecord]]) -> None:
    """Write (level, record) pairs as Parquet: a row a request, its events as two lists of the same length."""
    pairs = list(records)
    columns: dict[str, Any] = {"level": pa.array([level for level, _ in pairs], pa.string())}
    for name, kind in _PLAIN:
        columns[name] = pa.array([getattr(record, name) for _, record in pairs], kind)
    for name, index, kind in (("chunk_t_ns", 0, pa.int64()), ("chunk_tokens", 1, pa.int32())):
        columns[name] = pa.array([[chunk[index] for chunk in record.chunks] for _, record in pairs], pa.list_(kind))
    pq.write_table(pa.table(columns), path, compression="zstd")
