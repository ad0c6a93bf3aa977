"""What W&B has written on the disk: it has no reader of its own for it."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

WANDB_HEADER_LENGTH, BLOCK_LENGTH, FRAGMENT_HEADER = 7, 32768, struct.Struct("<IHB")


def wandb_parts(folder: Path) -> list[list[dict]]:
    """:return: rows of each process's part of an offline run, in the order of the processes"""
    parts = []
    for records in records_of_parts(folder):
        rows = [record.history.item for record in records if record.history.item]
        parts.append([{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows])
    return parts


def wandb_configs(folder: Path) -> list[dict]:
    """:return: the configuration at the end of each process's part of an offline run"""
    configs = []
    for records in records_of_parts(folder):
        updates = [update for record in records for update in (*record.run.config.update, *record.config.update)]
        configs.append({update.key: json.loads(update.value_json) for update in updates if update.key})
    return configs


def wandb_ids(folder: Path) -> set[str]:
    """:return: the identifiers of offline runs. A folder's name may end in a number: it was made within the same second."""
    return {record.run.run_id for records in records_of_parts(folder) for record in records if record.run.run_id}


def records_of_parts(folder: Path) -> Iterator[list[Record]]:
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        yield [Record.FromString(data) for data in leveldb_records(path.read_bytes()[WANDB_HEADER_LENGTH:])]


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """
    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md

    :param data: Log in LevelDB's format, with the first block shorter by W&B's header
    :return: its records, without one at the end that is torn
    """
    position, parts = 0, []
    while position + FRAGMENT_HEADER.size <= len(data):
        left_in_block = BLOCK_LENGTH - (position + WANDB_HEADER_LENGTH) % BLOCK_LENGTH
        if left_in_block < FRAGMENT_HEADER.size:
            position += left_in_block
            continue
        _, length, kind = FRAGMENT_HEADER.unpack_from(data, position)
        position += FRAGMENT_HEADER.size
        parts.append(data[position : position + length])
        position += length
        # 1 is a whole record, 2, 3 and 4 the first, middle and last part of one; 0 is space not yet written
        if kind == 0 or position > len(data):
            return
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []
