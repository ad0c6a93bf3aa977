"""
Files that hold the state of a run: one safetensors file each, with everything but the arrays as JSON in one of its
tensors.

A file is written under another name and then renamed, so it is either complete or not there. Its name ends in the first
digits of the SHA-256 of its content. Reading a file runs no code from it.
"""

import contextlib
import enum
import hashlib
import json
import re
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch as th
from numpy.lib.array_utils import byte_bounds
from safetensors import SafetensorError
from safetensors.torch import load, save

from sb3_qac.common.files import write_atomically
from sb3_qac.resume.state import (
    ObjectState,
    StateError,
    find_class,
    is_array_type,
    is_plain,
    items_of,
    kind_of,
    make_value,
)

FORMAT, VERSION = "sb3_qac checkpoint", "4"
NAME = re.compile(r"step-(\d+)\.([0-9a-f]{16})\.safetensors")
TAG = "!"
TREE = "!state"
# Types that safetensors stores directly; other arrays are stored as bytes
ARRAY_TYPES = frozenset("float16 float32 float64 int8 int16 int32 int64 uint8 bool".split())
CONTAINERS: dict[str, Any] = {
    **{"ordered": OrderedDict, "dict": dict},
    **{"tuple": tuple, "deque": deque, "set": set, "frozenset": frozenset},
}
# A checkpoint from somebody else must not fill the memory or the disk: nothing in it becomes more than so many times as large
LARGEST_RATIO = 100
# In bytes: enough for NumPy's largest number and for a vector register
ALIGNMENT = 64


class CheckpointError(ValueError):
    """A checkpoint is damaged, has another format, or belongs to a different run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint does not have the content that was written."""


class Checkpoint(NamedTuple):
    """
    :param path: The file
    :param state: What it holds
    """

    path: Path
    state: dict[str, Any]


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int = 3) -> Path:
    """
    Write a checkpoint, and remove the oldest ones beyond ``keep``.

    :param folder: Folder of a run's checkpoints
    :param step: Environment steps so far
    :param state: Plain data (see ``sb3_qac.resume.state``)
    :param keep: How many to keep, this one included
    :return: Path of the new file
    :raises OSError: if it could not be written; the other checkpoints are unchanged
    """
    encoder = _Encoder(state)
    tree = json.dumps(encoder.encode(state, ""), separators=(",", ":")).encode()
    arrays = {**encoder.arrays, TREE: th.frombuffer(bytearray(tree), dtype=th.uint8)}
    data = save(arrays, {"format": FORMAT, "version": VERSION})
    path = folder / f"step-{step:012d}.{_digest(data)}.safetensors"
    write_atomically(path, data)
    found = checkpoints_in(folder)
    # Names sort by steps. Checkpoints at or after this step are from before the run went back
    before = [old for old in found if old.name < f"step-{step:012d}"]
    for old in set(found) - {path, *before[max(len(before) - keep + 1, 0) :]}:
        old.unlink(missing_ok=True)
    # Left over from writes that a kill interrupted
    for torn in folder.glob(".step-*.tmp"):
        torn.unlink(missing_ok=True)
    return path


def checkpoints_in(folder: Path) -> list[Path]:
    """
    :param folder: Folder of a run's checkpoints
    :return: Files with the name of a checkpoint, oldest first
    """
    return sorted(path for path in folder.glob("step-*.safetensors") if NAME.fullmatch(path.name))


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """
    :param folder: Folder of a run's checkpoints
    :return: The newest good checkpoint, with a warning for each newer one that is damaged; None if there are none at all
    :raises CheckpointError: if there are some, but none is good; or if the newest one that is not damaged cannot be read, as
        that of a later version
    """
    paths = checkpoints_in(folder)
    for path in reversed(paths):
        try:
            return load_checkpoint(path)
        except DamagedCheckpointError as error:
            warnings.warn(f"{error} Going back to the one before.", stacklevel=2)
    if paths:
        raise CheckpointError(f"None of the {len(paths)} checkpoints in {folder} is good. Remove them to start anew.")
    return None


@contextlib.contextmanager
def restoring(checkpoint: Checkpoint) -> Iterator[None]:
    """
    Around what sets the state of a checkpoint, which may be from somebody else.

    :param checkpoint: The checkpoint
    :raises CheckpointError: if something in it is missing, or is something else than what sb3_qac writes
    """
    try:
        yield
    except (CheckpointError, StateError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path} cannot be restored ({type(error).__name__}: {error}).") from error


def load_checkpoint(path: Path) -> Checkpoint:
    """
    :param path: File of a checkpoint
    :return: The checkpoint
    :raises CheckpointError: if it is not a checkpoint, or of another version
    :raises DamagedCheckpointError: if it does not have the content that was written
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    name = NAME.fullmatch(path.name)
    if name is None:
        raise CheckpointError(f"{path} is not named as a checkpoint, 'step-<steps>.<16 digits of its SHA-256>.safetensors'.")
    if _digest(data) != name.group(2):
        raise DamagedCheckpointError(f"{path} is damaged: its SHA-256 starts with {_digest(data)}, not with {name.group(2)}.")
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is not a safetensors file ({error}).") from None
    metadata = header.get("__metadata__") or {}
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of sb3_qac, but {metadata.get('format', 'something else')!r}.")
    if metadata.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {metadata.get('version')} of the format, and this sb3_qac reads {VERSION}. "
            "Use the version of sb3_qac that wrote it."
        )
    try:
        # A copy, which is aligned and writable
        arrays = {name: array.clone() if name.startswith(TAG) else array for name, array in arrays.items()}
        tree = arrays.pop(TREE).numpy().tobytes()
        return Checkpoint(path, _Decoder(arrays).decode(json.loads(tree)))
    except (CheckpointError, StateError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    # SyntaxError: NumPy parses the name of a type as Python code. RuntimeError: PyTorch raises it for axes that do not fit
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError, re.error) as error:
        raise DamagedCheckpointError(
            f"{path} is not in the form that sb3_qac writes ({type(error).__name__}: {error})."
        ) from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class _Encoder:
    """
    Splits plain data into a tree that JSON can hold and its arrays.

    Arrays and tensors that share memory, such as two views of one array, share it again when they are read. A list that stands
    in two places, or another container that may change, is one object again.

    :param state: The plain data
    """

    def __init__(self, state: Any) -> None:
        # By their position in the plain data
        self.arrays: dict[str, th.Tensor] = {}
        # For what shares memory, by identity: the array, name of the shared block in `arrays`, and offset of its first byte
        self.views: dict[int, tuple[np.ndarray, str, int]] = {}
        parts = list(_parts_of(state))
        for i, overlapping in enumerate(_overlapping_arrays(parts)):
            self._add_memory(f"{TAG}memory/{i}", overlapping)
        # Numbers of the containers that stand in several places, by identity
        counts = Counter(id(part) for part in parts if isinstance(part, list | dict | deque | set))
        self.repeated = {key: number for number, key in enumerate(key for key, count in counts.items() if count > 1)}
        self.encoded: set[int] = set()

    def _add_memory(self, name: str, overlapping: list[tuple[int, np.ndarray]]) -> None:
        bounds = [byte_bounds(array) for _, array in overlapping]
        # Keeps numbers aligned
        start = min(low for low, _ in bounds) // ALIGNMENT * ALIGNMENT
        memory = np.zeros(max(high for _, high in bounds) - start, dtype=np.uint8)
        for key, array in overlapping:
            offset = array.__array_interface__["data"][0] - start
            np.ndarray(array.shape, array.dtype, memory.data, offset, array.strides)[...] = array
            self.views[key] = array, name, offset
        self.arrays[name] = th.from_numpy(memory)

    def encode(self, value: Any, name: str) -> Any:
        """
        :param value: Plain data
        :param name: Its position in the state
        :return: A value that JSON can hold
        """
        if value is None or type(value) in (bool, int, float, str):
            return value
        number = self.repeated.get(id(value))
        if number is None:
            return self._encode_once(value, name)
        if number in self.encoded:
            return {TAG: "same", "number": number}
        self.encoded.add(number)
        return {TAG: "same", "number": number, "value": self._encode_once(value, name)}

    def _encode_once(self, value: Any, name: str) -> Any:
        if isinstance(value, enum.Enum):
            # Members of a flag that are combined have no name
            return {TAG: "enum", "kind": kind_of(value), "member": value.value if isinstance(value, enum.Flag) else value.name}
        if type(value) is list:
            return [self.encode(item, f"{name}/{i}") for i, item in enumerate(value)]
        if type(value) is dict and all(type(key) is str for key in value) and TAG not in value:
            return {key: self.encode(item, f"{name}/{key}") for key, item in value.items()}
        if isinstance(value, ObjectState):
            return {TAG: "object", "kind": value.kind, "values": self.encode(value.values, name)}
        made_of = items_of(value)
        if made_of is not None:
            return {TAG: "value", "kind": kind_of(value), "items": self.encode(list(made_of), name)}
        if isinstance(value, dict | tuple | deque | set | frozenset):
            items: list[Any] = [list(item) for item in value.items()] if isinstance(value, dict) else list(value)
            kind = next(name for name, kind in CONTAINERS.items() if isinstance(value, kind))
            return {TAG: kind, "items": self.encode(items, name), "maxlen": getattr(value, "maxlen", None)}
        if not is_plain(value):
            raise TypeError(f"{name} is a {type(value).__name__}, which is no plain data.")
        return self._encode_array(value, name.lstrip("/"))

    def _encode_array(self, value: Any, name: str) -> dict[str, Any]:
        if id(value) in self.views:
            array, memory, offset = self.views[id(value)]
            layout = {"shape": list(array.shape), "strides": list(array.strides)}
            tensor = {"tensor": str(value.dtype).removeprefix("torch.")} if isinstance(value, th.Tensor) else {}
            return {TAG: "view", "name": memory, "dtype": _describe(array.dtype), "offset": offset, **layout, **tensor}
        # The keys "a/b" and "a", then "b", have the same position
        while name in self.arrays:
            name += "'"
        if isinstance(value, th.Tensor):
            axes = _memory_order(value.stride())
            self.arrays[name] = value.detach().cpu().permute(axes).contiguous().clone()
            learned = {"requires_grad": True} if value.requires_grad and value.is_leaf else {}
            return {TAG: "tensor", "name": name, "axes": axes, **learned}
        kind = "scalar" if isinstance(value, np.generic) else "bytes" if isinstance(value, bytes) else "array"
        array = np.frombuffer(value, dtype=np.uint8) if isinstance(value, bytes) else np.asarray(value)
        axes = _memory_order(array.strides)
        array = np.ascontiguousarray(array.transpose(axes)).reshape([array.shape[axis] for axis in axes])
        is_known = array.dtype.isnative and array.dtype.name in ARRAY_TYPES
        stored = array if is_known else np.frombuffer(array.tobytes(), dtype=np.uint8)
        self.arrays[name] = th.from_numpy(np.array(stored))
        return {TAG: kind, "name": name, "dtype": _describe(array.dtype), "shape": list(array.shape), "axes": axes}


def _describe(dtype: np.dtype) -> str | dict[str, str]:
    return dtype.str if dtype.names is None else {name: dtype[name].str for name in dtype.names}


def _memory_order(strides: Sequence[int]) -> list[int]:
    """
    The memory layout is kept, because PyTorch computes transposed images in another order, which changes the rounding, and its
    fused optimizers take the layout of a parameter for that of its moments.

    :param strides: Strides of an array or tensor
    :return: its axes in the order in which its memory has them
    """
    return sorted(range(len(strides)), key=lambda axis: -abs(strides[axis]))


def _overlapping_arrays(parts: list[Any]) -> Iterator[list[tuple[int, np.ndarray]]]:
    """
    :param parts: Parts of plain data
    :return: groups of arrays among them that share memory, each with the identity of its array or tensor
    """
    arrays = [(id(part), array) for part in parts if (array := _shown_as_array(part)) is not None and array.size > 0]
    group: list[tuple[int, np.ndarray]] = []
    end = 0
    for key, array in sorted(arrays, key=lambda item: byte_bounds(item[1])):
        low, high = byte_bounds(array)
        if array.nbytes > LARGEST_RATIO * (high - low):
            # One number in many places, as of `np.broadcast_to`, is written as what it shows
            continue
        if low >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append((key, array))
        end = max(end, high)
    if len(group) > 1:
        yield group


def _shown_as_array(value: Any) -> np.ndarray | None:
    """:return: an array with the memory of a tensor or an array, if NumPy can show it, as not that of sparse tensors"""
    if isinstance(value, th.Tensor):
        with contextlib.suppress(TypeError, RuntimeError):
            return (value.detach().view(th.int16) if value.dtype is th.bfloat16 else value.detach()).numpy()
    return value if isinstance(value, np.ndarray) and is_plain(value) else None


def _parts_of(value: Any) -> Iterator[Any]:
    """:return: everything in plain data, at any depth; what stands in several places comes several times"""
    yield value
    for item in _items(value):
        yield from _parts_of(item)


def _items(value: Any) -> Iterable[Any]:
    """:return: what an object in plain data consists of"""
    if isinstance(value, ObjectState):
        return (value.values,)
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | deque) else ()


class _Decoder:
    """
    Inverse of ``_Encoder``.

    :param arrays: Arrays of a file, by name
    """

    def __init__(self, arrays: dict[str, th.Tensor]) -> None:
        self.arrays = arrays
        # Containers that stand in several places, by their number, as far as they have been read
        self.repeated: dict[int, Any] = {}

    def decode(self, value: Any) -> Any:
        """
        :param value: Result of ``_Encoder.encode``
        :return: Plain data
        """
        if isinstance(value, list):
            return list(map(self.decode, value))
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: self.decode(item) for key, item in value.items()}
        return self._decode_tagged(value[TAG], value)

    def _decode_tagged(self, kind: str, value: dict[str, Any]) -> Any:
        if kind == "same":
            if "value" in value:
                self.repeated[value["number"]] = self.decode(value["value"])
            return self.repeated[value["number"]]
        if kind == "object":
            return ObjectState(value["kind"], self.decode(value["values"]))
        if kind == "enum":
            return _find_member(value["kind"], value["member"])
        if kind != "value" and kind not in CONTAINERS:
            return self._decode_array(kind, value)
        if not isinstance(value["items"], list):
            # A range of billions may stand in its place
            raise CheckpointError("it has a container without a list of items.")
        items = self.decode(value["items"])
        if kind == "value":
            return make_value(value["kind"], tuple(items))
        return deque(items, value["maxlen"]) if kind == "deque" else CONTAINERS[kind](items)

    def _decode_array(self, kind: str, value: dict[str, Any]) -> Any:
        stored = self.arrays[value["name"]]
        if kind == "tensor":
            tensor = stored.permute(np.argsort(value["axes"]).tolist())
            return tensor.requires_grad_(value.get("requires_grad", False))
        if kind == "bytes":
            return stored.numpy().tobytes()
        kept = value["dtype"]
        dtype = np.dtype(list(kept.items()) if isinstance(kept, dict) else str(kept))
        if not is_array_type(dtype):
            raise ValueError(f"an array of the type {dtype}")
        if kind == "view":
            return self._decode_view(stored.numpy().data, dtype, value)
        array = np.frombuffer(stored.numpy().tobytes(), dtype).reshape(value["shape"])
        return array[()] if kind == "scalar" else array.copy().transpose(np.argsort(value["axes"]))

    def _decode_view(self, memory: memoryview, dtype: np.dtype, value: dict[str, Any]) -> Any:
        # NumPy takes -1 for as many as there are, and then does not look whether they are inside the memory
        if any(length < 0 for length in value["shape"]):
            raise ValueError(f"an array of the shape {value['shape']}")
        array = np.ndarray(value["shape"], dtype, memory, value["offset"], value["strides"])
        if array.nbytes > LARGEST_RATIO * memory.nbytes:
            raise ValueError(f"an array that shows {memory.nbytes} bytes as {array.nbytes}")
        if "tensor" not in value:
            return array
        tensor_type = getattr(th, value["tensor"], None)
        if not isinstance(tensor_type, th.dtype) or tensor_type.itemsize != array.itemsize:
            raise ValueError(f"no tensor of type {value['tensor']}")
        return th.from_numpy(array).view(tensor_type)


def _find_member(kind: str, member: Any) -> enum.Enum:
    found = find_class(kind)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise CheckpointError(f"it has a member of the enum {kind}: import the module that defines it.")
    try:
        return found(member) if issubclass(found, enum.Flag) else found[member]
    except (KeyError, ValueError):
        raise CheckpointError(f"the enum {kind} has no member {member!r}.") from None
