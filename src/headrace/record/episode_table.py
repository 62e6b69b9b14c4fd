"""Episode records as Parquet (zstd): token-level lists as typed columns, free-form parts as JSON text columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.record.files import RecordError

SCHEMA_VERSION = 1
_ROWS_PER_GROUP = 256
_JSON = ("messages", "answer", "metadata", "score", "turns")
"""Columns whose shape is the task's or the reward's business."""

_IDS = pa.list_(pa.int32())
_PER_TOKEN = pa.list_(pa.float64())
"""As exact as the JSON lines; the low bits of float32 values are zero, and zstd removes them."""

_SCHEMA = pa.schema(
    [
        ("lineage", pa.int32()),
        ("update", pa.int64()),
        ("status", pa.string()),
        ("group", pa.int64()),
        ("member", pa.int32()),
        ("retry", pa.int32()),
        ("task_id", pa.string()),
        ("task_hash", pa.string()),
        ("environment", pa.string()),
        ("task_seed", pa.int64()),
        ("messages", pa.string()),
        ("answer", pa.string()),
        ("metadata", pa.string()),
        ("outcome", pa.string()),
        ("error", pa.string()),
        ("reward", pa.float64()),
        ("score", pa.string()),
        ("turns", pa.string()),
        ("policy_seed", pa.uint64()),
        ("issued_version", pa.list_(pa.int64())),
        ("started_s", pa.float64()),
        ("ended_s", pa.float64()),
        ("segment_sources", pa.list_(pa.string())),
        ("segment_parents", _IDS),
        ("segment_lengths", _IDS),
        ("version_spans", pa.list_(pa.list_(pa.int64()))),
        ("ids", _IDS),
        ("logprobs", _PER_TOKEN),
        ("kept_ids", pa.list_(_IDS)),
        ("mask", pa.list_(pa.int8())),
        ("trainer_logprobs", _PER_TOKEN),
        ("advantages", _PER_TOKEN),
    ],
    metadata={"headrace_schema_version": str(SCHEMA_VERSION)},
)


def write_parquet(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Write ``records`` to ``path`` in row groups; raises OSError where the disk does."""
    records = iter(records)
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
        while rows := list(islice(records, _ROWS_PER_GROUP)):
            packed = [{k: json.dumps(v, ensure_ascii=False) if k in _JSON else v for k, v in r.items()} for r in rows]
            writer.write_table(pa.Table.from_pylist(packed, schema=_SCHEMA))


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """The records of :func:`write_parquet`, equal to what went in. Raises RecordError for a newer schema."""
    with pq.ParquetFile(path) as file:
        metadata = file.schema_arrow.metadata or {}
        version = int(metadata.get(b"headrace_schema_version", b"0"))
        if not 1 <= version <= SCHEMA_VERSION:
            raise RecordError(f"{path} has episode schema {version}, this headrace reads up to {SCHEMA_VERSION}")
        for batch in file.iter_batches(batch_size=_ROWS_PER_GROUP):
            for row in batch.to_pylist():
                yield {k: json.loads(v) if k in _JSON else v for k, v in row.items()}
