"""What an offline run of W&B holds: its log, which is in LevelDB's format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _records(data: bytes) -> Iterator[bytes]:
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of the file *path*, as wandb's protocol has them."""
    from wandb.proto import wandb_internal_pb2

    for content in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        yield record


def wandb_history(path: Path) -> list[dict[str, Any]]:
    """What was logged in the run of the file *path*."""
    return [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in wandb_records(path)
        if record.WhichOneof("record_type") == "history"
    ]
