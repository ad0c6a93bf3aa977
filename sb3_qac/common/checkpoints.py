"""
Files that hold the state of a training: one safetensors file each, with what is no array as JSON in its header.

They are written beside their place and moved into it, so that one is there whole or not at all, and their name ends in the
first digits of the SHA-256 of their content. Reading one runs no code from it.
"""

import hashlib
import json
import os
import re
import warnings
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch as th
from safetensors import SafetensorError
from safetensors.torch import load, save

from sb3_qac.common.state import ObjectState, is_plain

FORMAT, VERSION = "sb3_qac checkpoint", 1
NAME = re.compile(r"step-(\d+)\.([0-9a-f]{16})\.safetensors")
TAG = "!"
# What safetensors stores as it is; other arrays go as bytes
ARRAY_TYPES = frozenset("float16 float32 float64 int8 int16 int32 int64 uint8 bool".split())


class CheckpointError(ValueError):
    """A checkpoint is damaged, or not one of this format, or of another training."""


class Checkpoint(NamedTuple):
    """
    :param path: The file
    :param state: What it holds
    """

    path: Path
    state: dict[str, Any]


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int = 3) -> Path:
    """
    Write a checkpoint, and remove those that are too many.

    :param folder: Folder of a run's checkpoints
    :param step: Environment steps so far
    :param state: Plain data (see ``sb3_qac.common.state``)
    :param keep: How many to keep, this one included
    :return: Path of the new file
    :raises OSError: if it could not be written; the others are as they were
    """
    arrays: dict[str, th.Tensor] = {}
    tree = json.dumps(_encode(state, "", arrays), separators=(",", ":"))
    data = save(arrays, {"format": FORMAT, "version": str(VERSION), "state": tree})
    path = folder / f"step-{step:012d}.{_digest(data)}.safetensors"
    write_atomically(path, data)
    found = checkpoints_in(folder)
    # Names are in the order of steps. The run went back from those at or after this step
    before = [old for old in found if old.name < f"step-{step:012d}"]
    for old in set(found) - {path, *before[max(len(before) - keep + 1, 0) :]}:
        old.unlink(missing_ok=True)
    # Of writes that a kill cut short
    for torn in folder.glob(".step-*.tmp"):
        torn.unlink(missing_ok=True)
    return path


def write_atomically(path: Path, data: bytes) -> None:
    """
    :param path: File to write; after a failure or a kill it is as it was before, or as it should be
    :param data: Its content
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        # The name is only on the disk when its folder is
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """
    :param path: JSON file
    :return: its content; empty if there is no such file
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def checkpoints_in(folder: Path) -> list[Path]:
    """
    :param folder: Folder of a run's checkpoints
    :return: Those that carry a checkpoint's name, oldest first
    """
    return sorted(path for path in folder.glob("step-*.safetensors") if NAME.fullmatch(path.name))


def load_checkpoint(path: Path) -> Checkpoint:
    """
    :param path: File of a checkpoint
    :return: The checkpoint
    :raises CheckpointError: if it is damaged or none of ours; the message names the newest good one of its folder
    """
    try:
        return _read(path)
    except CheckpointError as error:
        good = next((other for other in reversed(checkpoints_in(path.parent)) if other != path and _is_good(other)), None)
        newest = f"The newest good one there is {good.name}." if good is not None else "There is no good one in its folder."
        raise CheckpointError(f"{error} {newest}") from None


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """
    :param folder: Folder of a run's checkpoints
    :return: The newest that is good, with a warning for each newer one that is not; None if there is none at all
    :raises CheckpointError: if there are some, but none is good
    """
    paths = checkpoints_in(folder)
    for path in reversed(paths):
        try:
            return _read(path)
        except CheckpointError as error:
            warnings.warn(f"{error} Going back to the one before.", stacklevel=2)
    if paths:
        raise CheckpointError(f"None of the {len(paths)} checkpoints in {folder} is good. Remove them to start anew.")
    return None


def _is_good(path: Path) -> bool:
    try:
        _read(path)
    except CheckpointError:
        return False
    return True


def _read(path: Path) -> Checkpoint:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    name = NAME.fullmatch(path.name)
    if name is None:
        raise CheckpointError(f"{path} is not named as a checkpoint, 'step-<steps>.<16 digits of its SHA-256>.safetensors'.")
    if _digest(data) != name.group(2):
        raise CheckpointError(f"{path} is damaged: its SHA-256 starts with {_digest(data)}, not with {name.group(2)}.")
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is not a safetensors file ({error}).") from None
    metadata = header.get("__metadata__") or {}
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of sb3_qac, but {metadata.get('format', 'something else')!r}.")
    if metadata.get("version") != str(VERSION):
        raise CheckpointError(
            f"{path} has version {metadata.get('version')} of the format, and this sb3_qac reads version {VERSION}. "
            "Go on with the version of sb3_qac that wrote it."
        )
    try:
        return Checkpoint(path, _decode(json.loads(metadata["state"]), arrays))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not as sb3_qac writes them ({type(error).__name__}: {error}).") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _encode(value: Any, name: str, arrays: dict[str, th.Tensor]) -> Any:
    """
    :param value: Plain data
    :param name: Where it stands
    :param arrays: Its arrays are put here, by where they stand
    :return: What JSON can hold
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encode(item, f"{name}/{i}", arrays) for i, item in enumerate(value)]
    if isinstance(value, dict) and all(type(key) is str for key in value) and TAG not in value:
        return {key: _encode(item, f"{name}/{key}", arrays) for key, item in value.items()}
    if isinstance(value, ObjectState):
        return {TAG: "object", "kind": value.kind, "values": _encode(value.values, name, arrays)}
    if isinstance(value, dict | tuple | deque):
        items = [list(item) for item in value.items()] if isinstance(value, dict) else list(value)
        kind = next(kind for kind in (dict, tuple, deque) if isinstance(value, kind)).__name__
        return {TAG: kind, "items": _encode(items, name, arrays), "maxlen": getattr(value, "maxlen", None)}
    if not is_plain(value):
        raise TypeError(f"{name} is a {type(value).__name__}, which is no plain data.")
    return _encode_array(value, name.lstrip("/"), arrays)


def _encode_array(value: Any, name: str, arrays: dict[str, th.Tensor]) -> dict[str, Any]:
    """
    :param value: Tensor, array, number of numpy's, or bytes
    :param name: Where it stands
    :param arrays: It is put here
    :return: What JSON can hold
    """
    if isinstance(value, th.Tensor):
        arrays[name] = value.detach().cpu().contiguous().clone()
        return {TAG: "tensor", "name": name}
    kind = "scalar" if isinstance(value, np.generic) else "bytes" if isinstance(value, bytes) else "array"
    array = np.frombuffer(value, dtype=np.uint8) if isinstance(value, bytes) else np.asarray(value)
    # Transposed images stay so in memory: torch computes them in another order, which changes the rounding
    axes = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    array = np.ascontiguousarray(array.transpose(axes)).reshape([array.shape[axis] for axis in axes])
    stored = array if array.dtype.name in ARRAY_TYPES else np.frombuffer(array.tobytes(), dtype=np.uint8)
    arrays[name] = th.from_numpy(np.array(stored))
    return {TAG: kind, "name": name, "dtype": array.dtype.str, "shape": list(array.shape), "axes": axes}


def _decode(value: Any, arrays: dict[str, th.Tensor]) -> Any:
    """
    :param value: What ``_encode`` made
    :param arrays: Its arrays
    :return: Plain data
    """
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, arrays) for key, item in value.items()}
    kind = value[TAG]
    if kind == "object":
        return ObjectState(value["kind"], _decode(value["values"], arrays))
    if kind in ("dict", "tuple", "deque"):
        items = _decode(value["items"], arrays)
        return {"dict": dict, "tuple": tuple}[kind](items) if kind != "deque" else deque(items, value["maxlen"])
    if kind == "tensor":
        return arrays[value["name"]]
    data = arrays[value["name"]].numpy().tobytes()
    if kind == "bytes":
        return data
    array = np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"])
    return array[()] if kind == "scalar" else array.copy().transpose(np.argsort(value["axes"]))
