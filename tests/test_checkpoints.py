"""Checkpoint files: what goes in comes out, and nothing but a whole one of ours is read."""

import datetime
import enum
import json
import os
import pickle
import random
import re
import signal
import sys
import types
from collections import deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch as th
from safetensors.torch import load, save

from sb3_qac.resume import checkpoints
from sb3_qac.resume.checkpoints import CheckpointError, load_checkpoint, newest_checkpoint, save_checkpoint
from sb3_qac.resume.state import ObjectState, find_class, is_plain


def same(one, other):
    """Equal in type, value and, for arrays, in how they lie in memory."""
    if type(one) is not type(other):
        return False
    if isinstance(one, th.Tensor):
        return one.dtype == other.dtype and th.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        layout = getattr(one, "strides", None) == getattr(other, "strides", None)
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes() and layout
    if isinstance(one, ObjectState):
        return one.kind == other.kind and same(one.values, other.values)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return (
            len(one) == len(other) and getattr(one, "maxlen", 0) == getattr(other, "maxlen", 0) and all(map(same, one, other))
        )
    return one == other


class Doors(enum.Flag):
    LEFT, RIGHT = 1, 2


class Games:
    class Phase(enum.Enum):
        DAY, NIGHT = 1, 2


STATE = {
    "numbers": [1, 2**200, -0.1, 1e-310, float("inf"), True, None, "text ü", b"\x00\xff", b""],
    "numpy": [np.float32(0.1), np.float64(0.1), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True)],
    "arrays": [
        np.arange(6).astype(dtype).reshape(2, 3) for dtype in ("f2", "f8", "u1", "u4", "i8", "c16", "S3", "?", ">f4", ">i8")
    ],
    "empty": np.zeros((0, 3)),
    "zero-dimensional": np.array(1.5),
    "transposed": np.arange(24, dtype=np.uint8).reshape(2, 3, 4).transpose(0, 2, 1),
    "tensors": [th.rand(3), th.ones(2, dtype=th.bfloat16), th.tensor(3), th.zeros(0)],
    "containers": [
        (1, (2, [3])),
        deque([1, 2], maxlen=5),
        deque([1]),
        {1: "a", None: {"!": 2}},
        {"!": "tagged"},
        {3, (1, "a")},
        frozenset([2]),
    ],
    "object": ObjectState("a.Kind", {"array": np.ones(2), "inner": ObjectState("another", {})}),
}


def test_keys_with_slashes_keep_their_own_arrays(tmp_path):
    state = {"a": {"b": np.zeros(2), "c": th.zeros(2)}, "a/b": np.ones(3), "a/c": th.ones(3)}
    assert same(load_checkpoint(save_checkpoint(tmp_path, 5, state)).state, state)


def test_tensors_keep_their_memory_layout(tmp_path):
    images = th.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    state = {"plain": images, "channels last": images.to(memory_format=th.channels_last), "number": th.tensor(1.0)}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 5, state)).state
    assert all(th.equal(loaded[name], tensor) for name, tensor in state.items())
    assert [loaded[name].stride() for name in state] == [tensor.stride() for tensor in state.values()]


def test_a_tensor_that_is_learnt_can_be_learnt_further(tmp_path):
    state = {"learnt": th.ones(2, requires_grad=True), "computed": 2 * th.ones(2, requires_grad=True), "constant": th.ones(2)}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 5, state)).state
    assert {name: tensor.requires_grad for name, tensor in loaded.items()} == {
        "learnt": True,
        "computed": False,
        "constant": False,
    }
    loaded["learnt"].square().sum().backward()
    assert loaded["learnt"].grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", STATE)
def test_what_is_saved_is_what_is_loaded(name, tmp_path):
    path = save_checkpoint(tmp_path, 5, {name: STATE[name]})
    assert same(load_checkpoint(path).state, {name: STATE[name]})


BOARD = np.arange(24.0).reshape(4, 6)
IMAGE = np.arange(60, dtype=np.uint8).reshape(3, 4, 5).transpose(2, 0, 1)
NOT_OURS = th.arange(6.0).numpy()
SHARING = {
    "the same array": (BOARD, BOARD),
    "views": (BOARD[1:3], BOARD[:, 2:5], BOARD[3]),
    "backwards": (BOARD[::-1], BOARD[::2, ::-2]),
    "transposed": (IMAGE, IMAGE[1]),
    "bytes of numbers": (BOARD, BOARD.view(np.uint8)),
    "with the same tensor": (NOT_OURS, NOT_OURS[2:]),
    "broadcast": (BOARD, np.broadcast_to(BOARD[:, None], (4, 50, 6))),
    "not at all": (BOARD[:2], BOARD[2:], BOARD.copy(), np.zeros((0, 6))),
}


@pytest.mark.parametrize("name", SHARING)
def test_arrays_that_share_memory_share_it_again(name, tmp_path):
    arrays = SHARING[name]
    path = save_checkpoint(tmp_path, 5, {"env": ObjectState("a.Kind", {"views": arrays, "other": [arrays[0]]})})
    values = load_checkpoint(path).state["env"].values
    loaded = (*values["views"], *values["other"])
    assert same(loaded, (*arrays, arrays[0]))
    assert all(array.flags.aligned and array.flags.writeable for array in loaded)
    # `shares_memory` is exact: views that lie between each other's elements do not
    for i, one in enumerate(loaded):
        for j, other in enumerate(loaded):
            assert np.shares_memory(one, other) == np.shares_memory([*arrays, arrays[0]][i], [*arrays, arrays[0]][j])


def test_a_number_that_is_shown_a_thousand_times_is_read_again(tmp_path):
    number = np.ones(1)
    state = {"number": number, "shown": np.broadcast_to(number, (1000,))}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 5, state)).state
    assert loaded["number"].tolist() == [1] and loaded["shown"].tolist() == [1] * 1000


TENSOR = th.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize("dtype", [th.float32, th.bfloat16, th.bool, th.int64])
def test_tensors_that_share_memory_share_it_again(dtype, tmp_path):
    tensor = TENSOR.to(dtype)
    views = {"whole": tensor, "again": tensor, "row": tensor[1], "transposed": tensor.t(), "other": tensor.clone()}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 5, views)).state
    for name, view in views.items():
        assert loaded[name].dtype == dtype and th.equal(loaded[name], view) and loaded[name].stride() == view.stride()
    loaded["row"].zero_()
    assert not loaded["whole"][1].any() and not loaded["again"][1].any() and not loaded["transposed"][:, 1].any()
    assert th.equal(loaded["other"], tensor)


def test_an_array_shares_the_memory_of_its_tensor_again(tmp_path):
    tensor = TENSOR.clone()
    loaded = load_checkpoint(save_checkpoint(tmp_path, 5, {"tensor": tensor, "array": tensor.numpy()[:2]})).state
    loaded["array"][:] = 7
    assert loaded["tensor"].tolist() == [[7] * 4, [7] * 4, TENSOR[2].tolist()]


def test_a_container_in_several_places_is_one_object_again(tmp_path):
    hands, queue, seen = [[0], [1]], deque([1, 2], maxlen=3), {1, 2}
    state = {"hands": hands, "values": {"hand": hands[0], "pair": (hands, queue)}, "queue": queue, "sets": [seen, seen]}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 5, {"env": ObjectState("a.Kind", state)})).state["env"].values
    assert same(loaded, state)
    assert loaded["values"]["hand"] is loaded["hands"][0] and loaded["values"]["pair"][0] is loaded["hands"]
    assert loaded["values"]["pair"][1] is loaded["queue"] and loaded["sets"][0] is loaded["sets"][1]
    # Equal is not the same
    apart = load_checkpoint(save_checkpoint(tmp_path, 6, {"one": [0], "other": [0]})).state
    assert apart["one"] is not apart["other"]


def test_views_outside_their_memory_are_refused(tmp_path):
    """As in a file that someone wrote by hand."""
    memory = {"!memory/0": th.zeros(64, dtype=th.uint8)}
    view = {"!": "view", "name": "!memory/0", "dtype": "<f8", "offset": 0, "shape": [8], "strides": [8]}
    # A few bytes that are shown as many gigabytes
    many = {"shape": [10**9], "strides": [0]}
    changes = (many, {"offset": 8}, {"offset": -8}, {"strides": [16]}, {"strides": [-8]}, {"dtype": "|O"}, {"name": "other"})
    # NumPy does not look where these are
    changes += ({"shape": [-1], "strides": [-8]}, {"shape": [-1], "strides": [64], "offset": 128})
    tensors = [{"tensor": name} for name in ("float32", "load", "nothing")]
    for change in (*changes, *tensors):
        with pytest.raises(CheckpointError, match="is not in the form that sb3_qac writes"):
            load_checkpoint(renamed(tmp_path, written(memory, {"view": {**view, **change}})))


def test_an_object_is_not_saved(tmp_path):
    with pytest.raises(TypeError, match="inner/0 is a object, which is no plain data"):
        save_checkpoint(tmp_path, 5, {"inner": [object()]})
    assert not list(tmp_path.iterdir())


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 10, 100):
        save_checkpoint(tmp_path, step, {"step": step}, keep=3)
    assert [path.name.split(".")[0] for path in checkpoints.checkpoints_in(tmp_path)] == [
        f"step-{step:012d}" for step in (3, 10, 100)
    ]
    assert newest_checkpoint(tmp_path).state == {"step": 100}


def test_a_run_that_went_back_leaves_no_later_ones(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, {"step": step})
    save_checkpoint(tmp_path, 2, {"step": "two again"})
    assert [load_checkpoint(path).state["step"] for path in checkpoints.checkpoints_in(tmp_path)] == [1, "two again"]


def test_a_folder_without_checkpoints_has_no_newest(tmp_path):
    (tmp_path / "lock").touch()
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None


def damage(data: bytes, rng: random.Random) -> bytes:
    """:return: other bytes: cut off, with a bit flipped, a part overwritten, doubled, emptied, or something foreign"""
    kind = rng.choice(["cut", "flip", "flip", "zeros", "twice", "empty", "pickle", "text"])
    at = rng.randrange(len(data))
    return {
        "cut": data[:at],
        "flip": data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        "zeros": data[: at - 20] + bytes(40) + data[at + 20 :],
        "twice": data + data[at:],
        "empty": b"",
        "pickle": pickle.dumps({"state": 1}),
        "text": b"not a checkpoint",
    }[kind]


def test_random_damages_are_refused(tmp_path):
    rng = random.Random(0)
    good = save_checkpoint(tmp_path, 1, STATE)
    newest = save_checkpoint(tmp_path, 2, STATE)
    data = newest.read_bytes()
    for _ in range(60):
        damaged = damage(data, rng)
        if damaged == data:
            continue
        newest.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(newest)
    with pytest.warns(UserWarning, match="damaged.*Going back to the one before"):
        assert newest_checkpoint(tmp_path).path == good


def test_damage_that_fits_its_name_is_refused_too(tmp_path):
    """As by someone who writes a file and names it after its own digest."""
    rng = random.Random(1)
    data = save_checkpoint(tmp_path, 1, STATE).read_bytes()
    refused = 0
    for step in range(100):
        damaged = damage(data, rng)
        path = tmp_path / f"step-{step:012d}.{checkpoints._digest(damaged)}.safetensors"
        path.write_bytes(damaged)
        try:
            load_checkpoint(path)
        except CheckpointError:
            refused += 1
    # What is left is a flipped bit of a number, which nobody could tell
    assert refused > 50


@pytest.mark.parametrize(
    ("value", "change"),
    [
        *((np.arange(3.0), {"dtype": dtype}) for dtype in (",", "<f99", "(", "O", None)),
        *((th.ones(2, 3).T, {"axes": axes}) for axes in ([0], [0, 0, 1], "ab")),
        *((Games.Phase.DAY, {"kind": kind}) for kind in (5, None)),
        (Fraction(1, 2), {"kind": None}),
        ((1, 2), {"items": 3}),
    ],
    ids=str,
)
def test_what_sb3_qac_does_not_write_is_refused(value, change, tmp_path):
    """As in a file that someone wrote by hand."""
    tensors = load(save_checkpoint(tmp_path, 1, {"value": value}).read_bytes())
    tree = json.loads(tensors.pop(checkpoints.TREE).numpy().tobytes())
    assert change.keys() <= tree["value"].keys()
    tree["value"].update(change)
    with pytest.raises(CheckpointError, match=r"is not in the form that sb3_qac writes|without a list of items"):
        load_checkpoint(renamed(tmp_path, written(tensors, tree)))


def test_the_checkpoint_of_a_later_version_is_an_error_and_not_passed_over(tmp_path):
    """Training from the one before it would soon delete it."""
    save_checkpoint(tmp_path, 1, STATE)
    newest = renamed(tmp_path, save({"weight": th.ones(2)}, {"format": checkpoints.FORMAT, "version": "99"}))
    with pytest.raises(CheckpointError, match=rf"{newest.name} has version 99.*Use the version of sb3_qac that wrote it"):
        newest_checkpoint(tmp_path)


def test_a_long_list_is_not_in_the_header_of_a_safetensors_file_which_holds_at_most_100_mb(tmp_path):
    state = {"numbers": [0.1234567890123456] * 10_000}
    path = save_checkpoint(tmp_path, 1, state)
    assert int.from_bytes(path.read_bytes()[:8], "little") < 1000
    assert load_checkpoint(path).state == state


def test_members_of_enums_are_kept_in_all_containers(tmp_path):
    day, both = Games.Phase.DAY, Doors.LEFT | Doors.RIGHT
    state = {"deck": [day, (both, Doors(0))], "by phase": {day: [1]}, "set": {day}, "signal": signal.SIGINT}
    assert same(load_checkpoint(save_checkpoint(tmp_path, 1, state)).state, state)


def test_a_member_that_an_enum_no_longer_has_is_no_damage(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, {"phase": Games.Phase.DAY})
    monkeypatch.setattr(Games, "Phase", enum.Enum("Phase", "DUSK"))
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Phase has no member 'DAY'"):
        newest_checkpoint(tmp_path)


def test_an_enum_that_is_not_imported_is_asked_for(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, {"phase": Games.Phase.DAY})
    monkeypatch.delattr(Games, "Phase")
    with pytest.raises(CheckpointError, match=r"has a member of the enum .*Games\.Phase: import the module that defines it"):
        newest_checkpoint(tmp_path)


class Trade(NamedTuple):
    day: datetime.date
    prices: np.ndarray
    tags: list


Position = namedtuple("Position", "x y")
SUMMER = datetime.timezone(datetime.timedelta(hours=2), "CEST")
VALUES = [
    *(complex(1, -0.0), range(1, 9, 2), slice(None, -1), slice((1, 2.5)), Decimal("-1.50"), Decimal("sNaN7"), Fraction(-1, 3)),
    *(re.compile("a+", re.IGNORECASE), re.compile(b"\xff"), datetime.timedelta(-1, 2, 3), SUMMER, datetime.timezone.utc),
    *(datetime.date(2024, 2, 29), datetime.time(1, 2, 3, 4, SUMMER, fold=1)),
    *(datetime.datetime(2024, 10, 27, 2, 30, 0, 5, fold=1), datetime.datetime.max.replace(tzinfo=datetime.timezone.utc)),
    *(np.datetime64("2024-02-29T12:00"), np.timedelta64(3, "D"), Position(1, Position(2.5, None))),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_that_never_change_are_kept(value, tmp_path):
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, {"value": value, "in": [(value,)]})).state
    # Not all are equal to themselves, and some are equal without being the same
    assert repr(loaded) == repr({"value": value, "in": [(value,)]}) and type(loaded["value"]) is type(value)


def test_values_are_keys_and_hold_what_may_change(tmp_path):
    tags = ["a"]
    trade = Trade(datetime.date(2024, 2, 29), np.arange(3.0), tags)
    state = {"trades": [trade], "by day": {trade.day: 1, Position(0, 1): 2}, "days": {trade.day}, "tags": tags}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, state)).state
    assert same(loaded, state) and loaded["trades"][0].tags is loaded["tags"]


def test_a_value_of_a_class_that_cannot_be_found_is_no_plain_data(tmp_path):
    class Local(NamedTuple):
        x: int

    class Further(Position):
        """Its objects have attributes."""

    further = Further(1, 2)
    further.z = 3
    for value in (Local(1), further, np.zeros(2, dtype=[("x", "U3")])):
        assert not is_plain(value)


def test_only_named_tuples_and_known_values_are_made(tmp_path, monkeypatch):
    """As in a file that someone wrote by hand, or after a change of the class."""
    tensors = load(save_checkpoint(tmp_path, 1, {"value": Position(1, 2)}).read_bytes())
    tree = json.loads(tensors.pop(checkpoints.TREE).numpy().tobytes())
    assert tree["value"] == {"!": "value", "kind": f"{__name__}.Position", "items": [1, 2]}
    for kind in ("subprocess.Popen", "os.system", "builtins.tuple", f"{__name__}.Missing", f"{__name__}.Trade"):
        tree["value"]["kind"] = kind
        with pytest.raises(CheckpointError, match=f"There is no named tuple {kind} with 2 fields: import the module"):
            load_checkpoint(renamed(tmp_path, written(tensors, tree)))
    for kind, items in (("re.Pattern", ["(", 0]), ("decimal.Decimal", ["x"]), ("datetime.date", [2024, 2, 30])):
        tree["value"].update(kind=kind, items=items)
        with pytest.raises(CheckpointError, match="is not in the form that sb3_qac writes"):
            load_checkpoint(renamed(tmp_path, written(tensors, tree)))


def test_the_class_of_a_value_is_found_without_running_code(tmp_path, monkeypatch):
    asked = []
    module = types.ModuleType("lazy_module")
    module.__getattr__ = asked.append
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    assert find_class("lazy_module.Position") is None and not asked


def written(tensors, tree):
    """:return: the bytes of a checkpoint with this tree and these further tensors"""
    tree = th.frombuffer(bytearray(json.dumps(tree).encode()), dtype=th.uint8)
    return save({**tensors, checkpoints.TREE: tree}, {"format": checkpoints.FORMAT, "version": checkpoints.VERSION})


def renamed(folder, data):
    path = folder / f"step-{7:012d}.{checkpoints._digest(data)}.safetensors"
    path.write_bytes(data)
    return path


def test_foreign_files_are_refused_with_what_they_are(tmp_path):
    tensors = {"weight": th.ones(2)}
    cases = {
        "is not a checkpoint of sb3_qac, but 'pt'": renamed(tmp_path, save(tensors, {"format": "pt"})),
        "is not a checkpoint of sb3_qac, but 'something else'": renamed(tmp_path, save(tensors)),
        "has version 99 of the format, and this sb3_qac reads 4": renamed(
            tmp_path, save(tensors, {"format": checkpoints.FORMAT, "version": "99"})
        ),
        "is not a safetensors file": renamed(tmp_path, b"text"),
        "is not named as a checkpoint": tmp_path / "best_model.zip",
        "cannot be read .No such file": tmp_path / "step-000000000009.0123456789abcdef.safetensors",
    }
    (tmp_path / "best_model.zip").write_bytes(b"PK")
    for message, path in cases.items():
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path)


def test_a_folder_with_nothing_but_damaged_checkpoints_is_refused(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, STATE).write_bytes(b"text")
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(CheckpointError, match=r"None of the 2 checkpoints in .* is"),
    ):
        newest_checkpoint(tmp_path)


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    good = save_checkpoint(tmp_path, 1, {"step": 1})

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 2, {"step": 2})
    assert list(tmp_path.iterdir()) == [good]
    assert newest_checkpoint(tmp_path).state == {"step": 1}


def test_what_a_kill_left_of_a_write_is_removed_by_the_next(tmp_path):
    (tmp_path / ".step-000000000001.0123456789abcdef.safetensors.tmp").write_bytes(b"half")
    assert newest_checkpoint(tmp_path) is None
    path = save_checkpoint(tmp_path, 2, {"step": 2})
    assert list(tmp_path.iterdir()) == [path]


def test_reading_runs_no_code(tmp_path, monkeypatch):
    path = save_checkpoint(tmp_path, 1, STATE)

    def no_pickle(*args, **kwargs):
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (th, "load"), (np, "load")):
        monkeypatch.setattr(module, name, no_pickle)
    assert same(load_checkpoint(path).state, STATE)
