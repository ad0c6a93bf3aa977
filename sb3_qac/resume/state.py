"""
The state of live objects as plain data: taken from one object, and set in another that was built in the same way.

Nothing is pickled, and reading creates no objects: numbers, arrays and the states of random generators are put into the
attributes of an existing object.
"""

import contextlib
import ctypes
import datetime
import enum
import functools
import inspect
import io
import os
import random
import re
import sys
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import singledispatch
from pathlib import PurePath
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.stacked_observations import StackedObservations
from torch.utils.hooks import RemovableHandle

from sb3_qac.common.random_state import GENERATORS, checked, generator_state

# Attributes that describe how an object was built
SKIPPED_ATTRIBUTES = frozenset({"_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs"})
# Further ones of environments, some of which every step overwrites. Other objects may have state under these names
ENV_ATTRIBUTES = frozenset(
    {"spec", "metadata", "class_attributes", "buf_infos", "reset_infos", "_cached_spec", "_metadata", "render_mode"}
)
CONSTANTS = (
    types.ModuleType,
    types.FunctionType,
    functools.partial,
    type(functools.lru_cache(None)(len)),
    np.ufunc,
    # Functions of NumPy that are none
    type(np.clip),
    type,
    io.IOBase,
    PurePath,
    Logger,
    KVWriter,
    ResultsWriter,
    np.dtype,
    th.dtype,
    th.device,
    RemovableHandle,
    gym.envs.registration.EnvSpec,
)
# Packages whose objects are displays or services
SERVICES = ("logging", "matplotlib", "optuna", "rich", "tensorboard", "torch.utils.tensorboard", "tqdm", "wandb")
# Of pygame: what shows and plays a game
PYGAME_CONSTANTS = frozenset({"Surface", "Clock", "Font", "Sound", "Color"})
# Values that never change: from a value to the arguments that make it again, and what takes them
VALUES: dict[type, tuple[Callable[[Any], tuple], Callable[..., Any]]] = {
    complex: (lambda value: (value.real, value.imag), complex),
    range: (lambda value: (value.start, value.stop, value.step), range),
    slice: (lambda value: (value.start, value.stop, value.step), slice),
    Decimal: (lambda value: (str(value),), Decimal),
    Fraction: (lambda value: (value.numerator, value.denominator), Fraction),
    re.Pattern: (lambda value: (value.pattern, value.flags), re.compile),
    datetime.timedelta: (lambda value: (value.days, value.seconds, value.microseconds), datetime.timedelta),
    datetime.timezone: (lambda value: value.__getinitargs__(), datetime.timezone),
    datetime.date: (lambda value: (value.year, value.month, value.day), datetime.date),
    datetime.time: (lambda value: _time_of(value), lambda fold, *args: datetime.time(*args, fold=fold)),
    datetime.datetime: (
        lambda value: (value.fold, value.year, value.month, value.day, *_time_of(value)[1:]),
        lambda fold, *args: datetime.datetime(*args, fold=fold),
    ),
}
# No checkpoint has containers that are nested more deeply (one may contain itself), and whole numbers with more bits
MOST_LEVELS, MOST_BITS = 100, 14_000
METHODS = (types.MethodType, types.BuiltinMethodType)
IMMUTABLE = (str, bytes, int, float, tuple, frozenset)
PLAIN_DICTS = (dict, OrderedDict)
# Objects that may stand in a list or dictionary, because their number does not change during a run
BUILT_ONCE = (gym.Env, VecEnv, spaces.Space, RunningMeanStd, StackedObservations, *GENERATORS)


class StateError(ValueError):
    """The state of an object cannot be taken, or does not fit the object in which it should be set."""


@dataclass
class ObjectState:
    """
    State of an object that is not itself plain data.

    :param kind: Name of its class
    :param values: Plain data, and states of further objects, by name
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)


def kind_of(obj: Any) -> str:
    """
    :param obj: Any object
    :return: Full name of its class
    """
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def find_class(kind: str) -> Any:
    """
    :param kind: Result of ``kind_of``
    :return: the class, if its module has been imported and has it under its name; otherwise None
    """
    names = kind.split(".")
    for end in range(len(names) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(names[:end]))
        if found is not None:
            for name in names[end:]:
                # Not `getattr`, which may import something or run other code
                found = getattr(found, "__dict__", {}).get(name)
            return found
    return None


def _time_of(value: datetime.time | datetime.datetime) -> tuple:
    return value.fold, value.hour, value.minute, value.second, value.microsecond, value.tzinfo


def items_of(value: Any) -> tuple | None:
    """
    :param value: Any object
    :return: what ``make_value`` makes it of again, if it is a named tuple or one of ``VALUES``; otherwise None
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # One without attributes, whose class can be found again
        is_known = not getattr(value, "__dict__", None) and find_class(kind_of(value)) is type(value)
        return tuple(value) if is_known else None
    return VALUES[type(value)][0](value) if type(value) in VALUES else None


def make_value(kind: str, items: tuple) -> Any:
    """
    :param kind: Name of the class of a value
    :param items: Result of ``items_of``
    :return: the value; no code of a class of the user's has run
    :raises StateError: if there is no such class
    """
    for known, (_, make) in VALUES.items():
        if kind == f"{known.__module__}.{known.__qualname__}":
            return make(*items)
    found = find_class(kind)
    fields = getattr(found, "_fields", None)
    if not (isinstance(found, type) and issubclass(found, tuple) and isinstance(fields, tuple) and len(fields) == len(items)):
        raise StateError(f"There is no named tuple {kind} with {len(items)} fields: import the module that defines it.")
    return tuple.__new__(found, items)


def is_array_type(dtype: np.dtype) -> bool:
    """
    :param dtype: Type of an array
    :return: Whether checkpoints have such arrays: not of objects, which are addresses, and structured ones of numbers only
    """
    if dtype.names is None:
        return not dtype.hasobject
    fields = [(name, dtype[name]) for name in dtype.names]
    # As it is written: without padding
    return np.dtype(fields) == dtype and all(field.kind in "?biufcmM" for _, field in fields)


def is_plain(value: Any, levels: int = MOST_LEVELS) -> bool:
    """
    :param value: Any object
    :param levels: How deeply its containers may be nested; one that contains itself is too deep
    :return: Whether it consists only of numbers, strings, further values, members of enums, arrays, tensors and containers of
        these
    """
    if type(value) is int:
        return value.bit_length() <= MOST_BITS
    if value is None or type(value) in (bool, float, str, bytes, th.Tensor):
        return True
    if isinstance(value, enum.Enum):
        return find_class(kind_of(value)) is type(value)
    if isinstance(value, np.generic):
        # One with fields is a view of the array that it comes from
        return value.dtype.names is None and not value.dtype.hasobject
    if type(value) is np.ndarray:
        return is_array_type(value.dtype)
    items = items_of(value)
    if items is None and type(value) in (list, tuple, deque, set, frozenset):
        items = value
    elif items is None and type(value) in PLAIN_DICTS:
        items = (*value.keys(), *value.values())
    return items is not None and levels > 0 and all(is_plain(item, levels - 1) for item in items)


def get_plain_attributes(obj: Any) -> dict[str, Any]:
    """
    :param obj: Any object
    :return: its attributes that are plain data
    """
    excluded = _excluded(obj)
    return {name: value for name, value in vars(obj).items() if name not in excluded and is_plain(value)}


def _excluded(obj: Any) -> frozenset[str]:
    """:return: names of attributes that its class keeps out of checkpoints, such as data that it reads from a file"""
    names = getattr(type(obj), "excluded_from_checkpoints", ())
    return frozenset((names,) if isinstance(names, str) else names)


def set_attributes(obj: Any, values: dict[str, Any]) -> None:
    """
    Inverse of ``get_plain_attributes``. What is no state stays as it is, and so do paths.

    :param obj: Object that was built in the same way
    :param values: Result of ``get_plain_attributes``
    """
    for name, value in values.items():
        # Nothing hides a method
        replaced = vars(obj).get(name, inspect.getattr_static(type(obj), name, None))
        if is_constant(replaced, set()) or _has_foreign_path(value, replaced, vars(obj), f"{type(obj).__name__}.{name}"):
            continue
        vars(obj)[name] = _on_device_of(replaced, value)


def _has_foreign_path(value: Any, current: Any, own: Any, name: str) -> bool:
    """
    A checkpoint may be from somebody else, or from another machine. Files are read and written where this start says.

    :param value: Plain data of a checkpoint
    :param current: What is to be replaced
    :param own: All that belongs to the same object
    :param name: What to call it in warnings
    :return: Whether a path would come from the checkpoint that is in no folder that the object names; a warning says so
    """
    paths = [value] if isinstance(value, str) and any(_paths_in([current])) else list(_paths_in(value))
    folders = [_absolute(path) for path in _paths_in(own)] if paths else []
    foreign = [path for path in paths if not any(_absolute(path).is_relative_to(folder) for folder in folders)]
    if foreign:
        warnings.warn(
            f"{name} is not restored, because the checkpoint has a path there that this start does not have, {foreign[0]!r}.",
            stacklevel=2,
        )
    return bool(foreign)


def _paths_in(value: Any) -> Iterator[str]:
    """
    :param value: Any object
    :return: the paths in it and its containers that may lead out of the working folder, and addresses on the net
    """
    if not isinstance(value, str | PurePath):
        for item in _parts_with_paths(value):
            yield from _paths_in(item)
        return
    text = str(value)
    # A quick look first. A single character is no path, but may be part of a map
    if len(text) > 1 and ("/" in text or os.sep in text or text == ".."):
        path = PurePath(text)
        if path.anchor or ".." in path.parts or path.parts[0] == "~" or "://" in text:
            yield text


def _parts_with_paths(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return value
    if isinstance(value, bytes):
        # More bytes, or a zero among them, are no path
        return [os.fsdecode(value)] if len(value) < 4096 and 0 not in value else []
    if isinstance(value, np.ndarray) and value.dtype.kind in "SU" and value.dtype.itemsize > 1:
        return value.ravel().tolist()
    return items_of(value) or ()


def _absolute(path: str) -> PurePath:
    return PurePath(path if "://" in path else os.path.abspath(os.path.expanduser(path)))


def _on_device_of(current: Any, value: Any) -> Any:
    """
    :param current: What is to be replaced
    :param value: Plain data of a checkpoint, which has all tensors on the CPU
    :return: the data, with each tensor on the device of the one that it replaces. Dictionaries and lists are changed in place,
        because several attributes may refer to them
    """
    if isinstance(value, th.Tensor) and isinstance(current, th.Tensor) and value.device != current.device:
        return value.detach().to(current.device).requires_grad_(value.requires_grad)
    here = items_by_key(current)
    for key, item in items_by_key(value).items() if isinstance(value, dict | list) else ():
        value[key] = _on_device_of(here.get(key), item)
    return value


def equal(one: Any, other: Any) -> bool:
    """
    :param one: Plain data
    :param other: Plain data
    :return: Whether they are certainly equal, including arrays in dictionaries, lists and tuples
    """
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(equal, one, other))
    return np.array_equal(one, other)


def get_state(obj: Any, name: str = "object", seen: set[int] | None = None) -> Any:
    """
    :param obj: Object whose state to take: plain data, or an object with such attributes at any depth
    :param name: What to call it in errors
    :param seen: Identities of objects to leave out; objects whose state is taken are added
    :return: Plain data and ``ObjectState``
    :raises StateError: if a part is neither and no function is registered for its class; the message says where
    """
    seen = set() if seen is None else seen
    if is_plain(obj):
        return obj
    seen.add(id(obj))
    return ObjectState(kind_of(obj), get_values(obj, name, seen))


def set_state(obj: Any, state: Any, name: str = "object") -> None:
    """
    :param obj: Object that was built in the same way as the one whose state was taken
    :param state: Result of ``get_state``
    :param name: What to call it in errors
    :raises StateError: if it is built differently; the message says where
    """
    if not isinstance(state, ObjectState) or state.kind != kind_of(obj) or is_constant(obj, set()):
        found = state.kind if isinstance(state, ObjectState) else type(state).__name__
        raise StateError(f"{name} is a {kind_of(obj)}, but its saved state is that of a {found}: build it as it was.")
    set_values(obj, state.values, name)


@singledispatch
def get_values(obj: Any, name: str, seen: set[int]) -> dict[str, Any]:
    """
    State of an object, depending on its class. To support a class whose state is not in Python attributes, register functions
    for it with ``get_values.register`` and ``set_values.register``.

    :param obj: The object
    :param name: What to call it in errors
    :param seen: Identities of objects whose state is already taken
    :return: Its state by name
    :raises StateError: if the object keeps its state outside Python attributes
    """
    # The attributes of a container, if any, are not its content
    if has_hidden_state(obj) or isinstance(obj, list | tuple | set | deque | enum.Enum):
        raise _cannot_be_taken(obj, name)
    is_env = isinstance(obj, gym.Env | VecEnv)
    described = {key for key in ENV_ATTRIBUTES if is_env or not is_plain(vars(obj).get(key))}
    return get_attributes(obj, name, seen, SKIPPED_ATTRIBUTES | described)


def _cannot_be_taken(obj: Any, name: str) -> StateError:
    return StateError(
        f"The state of {name} ({kind_of(obj)}) cannot be taken, so this run could not be resumed exactly. "
        "Wrap an environment in `sb3_qac.common.wrappers.EpisodeReplay`. Elsewhere use numbers, arrays or random "
        "generators, or register functions for the class with `sb3_qac.resume.state.get_values` and `set_values`."
    )


class _OnlyAttributes:
    """A class whose objects have nothing but their attributes."""


def has_hidden_state(obj: Any) -> bool:
    """
    :param obj: Any object
    :return: Whether something of it is not in its attributes, but in memory of a class in C or in slots
    """
    # The attributes of a library in C are its address, which is another one in the next process
    if not hasattr(obj, "__dict__") or isinstance(obj, ctypes.CDLL):
        return True
    kind = type(obj)
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = {name for of_base in slots for name in ([of_base] if isinstance(of_base, str) else of_base)}
    in_c = kind.__basicsize__ > _OnlyAttributes.__basicsize__ or kind.__itemsize__ > 0
    # The memory of a namespace in C is its attributes
    return (in_c and not isinstance(obj, types.SimpleNamespace)) or not names <= {"__dict__", "__weakref__"}


def get_attributes(
    obj: Any, name: str, seen: set[int], skipped: Container[str], left_out: dict[str, str] | None = None
) -> dict[str, Any]:
    """
    :param obj: An object
    :param name: What to call it in errors
    :param seen: Identities of objects whose state is already taken
    :param skipped: Names of attributes to leave out
    :param left_out: If given, attributes whose state cannot be taken are left out, and added to it with the reason
    :return: Its state by name
    :raises StateError: if a part of it cannot be taken
    """
    values: dict[str, Any] = {}
    excluded = _excluded(obj)
    for key, value in vars(obj).items():
        if key in skipped or key in excluded:
            continue
        path, seen_before = f"{name}.{key}", set(seen)
        try:
            if not (is_constant(value, seen) or _is_seen(value, seen)):
                values[key] = _attribute_state(value, path, seen)
        except (StateError, RecursionError) as error:
            if isinstance(error, RecursionError):
                error = StateError(f"{path} contains itself, or is nested too deeply to be saved.")
            if left_out is None:
                raise error from None
            left_out[path] = str(error)
            # Another attribute may have what was seen of this one
            seen.intersection_update(seen_before)
    return values


def _attribute_state(value: Any, name: str, seen: set[int]) -> Any:
    items = items_by_key(value)
    if all(isinstance(item, BUILT_ONCE) for item in items.values()) and items and is_plain(list(items)):
        states = {key: get_state(item, f"{name}[{key!r}]", seen) for key, item in items.items()}
        return states if isinstance(value, dict) else list(states.values())
    state = get_state(value, name, seen)
    if isinstance(value, dict):
        # As with other dictionaries, several attributes may have come to refer to it
        seen.discard(id(value))
    return state


def _is_seen(value: Any, seen: set[int]) -> bool:
    return id(value) in seen or (isinstance(value, list | tuple) and bool(value) and all(id(item) in seen for item in value))


def is_constant(value: Any, seen: set[int]) -> bool:
    """
    :param value: Value of an attribute
    :param seen: Identities of objects whose state is already taken
    :return: Whether it is no further state: code, a file, a description, a display, a service, or a container of these
    """
    items = value.flat if isinstance(value, np.ndarray) and value.dtype.hasobject else items_by_key(value).values()
    if any(item is not None for item in items) and not is_plain(value):
        # Displays that are made when they are needed are None before
        return all(item is None or is_constant(item, seen) for item in items)
    if isinstance(value, METHODS):
        # Functions of modules have one too
        owner = value.__self__
        return owner is None or isinstance(owner, IMMUTABLE) or id(owner) in seen or is_constant(owner, seen)
    module = f"{type(value).__module__}."
    return (
        isinstance(value, CONSTANTS)
        or module.startswith(tuple(f"{package}." for package in SERVICES))
        or (module.startswith("pygame.") and type(value).__name__ in PYGAME_CONSTANTS)
    )


def objects_in(state: Any, name: str) -> Iterator[tuple[str, str]]:
    """
    :param state: Result of ``get_state``
    :param name: What to call it
    :return: the place and the class of each object in it that must exist before its state can be set again, and the place and
        the number of items of each list or dictionary of such objects
    """
    # A missing random generator is made
    if isinstance(state, ObjectState) and state.kind != "numpy.random._generator.Generator":
        yield name, state.kind
        for key, value in state.values.items():
            yield from objects_in(value, f"{name}.{key}")
    items = items_by_key(state)
    if items and all(isinstance(item, ObjectState) for item in items.values()):
        yield name, f"{type(state).__name__} of {len(items)} objects"
    for key, value in items.items():
        yield from objects_in(value, f"{name}[{key!r}]")


def check_objects(here: dict[str, Any], there: dict[str, Any], name: str) -> None:
    """
    :param here: Result of ``get_attributes`` for an object of this process
    :param there: Result of ``get_attributes`` of a checkpoint
    :param name: What to call the object
    :raises StateError: if the checkpoint has the state of an object that is not a part of this one, such as the model to which
        it refers
    """
    objects = dict(objects_in(ObjectState("", here), name))
    for place, kind in objects_in(ObjectState("", there), name):
        if objects.get(place) != kind:
            found = f"is a {objects[place]}" if place in objects else "has no state of its own"
            raise StateError(f"{place} {found}, but its saved state is that of a {kind}: build it as it was.")


@singledispatch
def set_values(obj: Any, values: dict[str, Any], name: str) -> None:
    """
    Inverse of ``get_values``.

    :param obj: Object that was built in the same way
    :param values: Result of ``get_values``
    :param name: What to call it in errors
    :raises StateError: if the object is built differently
    """
    restore_attributes(obj, values, name)


def restore_attributes(obj: Any, values: dict[str, Any], name: str) -> None:
    """
    Inverse of ``get_attributes``.

    :param obj: Object that was built in the same way
    :param values: Result of ``get_attributes``
    :param name: What to call it in errors
    :raises StateError: if a part of it is built differently
    """
    # What its own state would not have either
    skipped = {*SKIPPED_ATTRIBUTES, *_excluded(obj), *(ENV_ATTRIBUTES if isinstance(obj, gym.Env | VecEnv) else ())}
    for key, value in values.items():
        if key in skipped:
            continue
        current, path = vars(obj).get(key), f"{name}.{key}"
        if isinstance(value, ObjectState):
            if current is None and value.kind == "numpy.random._generator.Generator":
                current = vars(obj)[key] = np.random.default_rng()
            set_state(current, value, path)
        elif any(isinstance(state, ObjectState) for state in items_by_key(value).values()):
            here, there = items_by_key(current), items_by_key(value)
            if here.keys() != there.keys():
                raise StateError(f"{path} does not have the {len(there)} items of the saved state: build it as it was.")
            for part, state in there.items():
                set_state(here[part], state, f"{path}[{part!r}]")
        else:
            set_attributes(obj, {key: value})


def items_by_key(value: Any) -> dict[Any, Any]:
    """
    :param value: Anything
    :return: the items of a list, a tuple or a dictionary by index or key; none of anything else
    """
    return dict(value) if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list | tuple) else {}


@get_values.register
def _(obj: dict, name: str, seen: set[int]) -> dict[str, Any]:
    """A ``Counter`` or another subclass: its items, and its attributes if its class has any."""
    items = dict(obj)
    if type(obj) in PLAIN_DICTS or not is_plain(items):
        raise _cannot_be_taken(obj, name)
    attributes = get_attributes(obj, name, seen, SKIPPED_ATTRIBUTES) if hasattr(obj, "__dict__") else {}
    return {"items": items, "attributes": attributes}


@set_values.register
def _(obj: dict, values: dict[str, Any], name: str) -> None:
    if not _has_foreign_path(values["items"], None, obj, name):
        items = _on_device_of(obj, values["items"])
        obj.clear()
        obj.update(items)
    restore_attributes(obj, values["attributes"], name)


@get_values.register(types.MethodType)
@get_values.register(types.BuiltinMethodType)
def _(obj: Any, name: str, seen: set[int]) -> dict[str, Any]:
    """A method has the state of its object. That of a list or dictionary would not be the one that is restored elsewhere."""
    if is_plain(obj.__self__):
        raise _cannot_be_taken(obj, name)
    return {"object": get_state(obj.__self__, f"{name}.__self__", seen)}


@set_values.register(types.MethodType)
@set_values.register(types.BuiltinMethodType)
def _(obj: Any, values: dict[str, Any], name: str) -> None:
    set_state(obj.__self__, values["object"], f"{name}.__self__")


@get_values.register(np.random.Generator)
@get_values.register(np.random.RandomState)
@get_values.register(random.Random)
@get_values.register(th.Generator)
def _(obj: Any, name: str, seen: set[int]) -> dict[str, Any]:
    return generator_state(obj)


@set_values.register
def _(obj: np.random.Generator, values: dict[str, Any], name: str) -> None:
    bit_generator: Any = obj.bit_generator
    kind, here = values["state"]["bit_generator"], bit_generator.state["bit_generator"]
    if kind != here:
        raise StateError(f"{name} is a {here} generator, but its saved state is that of a {kind}.")
    bit_generator.state = checked(values["state"])
    if "seeds" in values and values["seeds"] != getattr(bit_generator.seed_seq, "state", None):
        # Not possible before NumPy 2
        with contextlib.suppress(TypeError):
            bit_generator.__setstate__((values["state"], np.random.SeedSequence(**values["seeds"])))


@set_values.register(np.random.RandomState)
@set_values.register(random.Random)
@set_values.register(th.Generator)
def _(obj: Any, values: dict[str, Any], name: str) -> None:
    if isinstance(obj, random.Random):
        obj.setstate(values["state"])
    else:
        obj.set_state(checked(values["state"]) if isinstance(obj, np.random.RandomState) else values["state"])


# It draws from the operating system
get_values.register(random.SystemRandom, lambda obj, name, seen: {})
set_values.register(random.SystemRandom, lambda obj, values, name: None)


@get_values.register
def _(obj: spaces.Space, name: str, seen: set[int]) -> dict[str, Any]:
    """A space never changes, but has its own random generator, and so do the spaces inside a composite space."""
    return {
        "generator": None if obj._np_random is None else obj._np_random.bit_generator.state,
        "parts": [get_values(part, name, seen) for part in _parts(obj)],
    }


@set_values.register
def _(obj: spaces.Space, values: dict[str, Any], name: str) -> None:
    if values["generator"] is not None:
        obj.np_random.bit_generator.state = checked(values["generator"])
    for part, state in zip(_parts(obj), values["parts"], strict=True):
        set_values(part, state, name)


def _parts(space: spaces.Space) -> list[spaces.Space]:
    parts = getattr(space, "spaces", [])
    return list(parts.values() if isinstance(parts, dict) else parts)
