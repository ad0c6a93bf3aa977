"""Files of the package, and files that are either complete or absent."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent


def presets(name: str) -> Path:
    """
    :param name: Name of an algorithm, such as "qa2c", or of a study, such as "studies/pong"
    :return: Path of its file of hyperparameters, which is in the package or, in a checkout, next to it
    """
    inside, beside = PACKAGE / "hyperparams", PACKAGE.parent / "hyperparams"
    return (inside if inside.is_dir() else beside) / f"{name}.yml"


def make_folder(path: Path) -> Path:
    """
    :param path: Folder to make, with those above it, unless it is there
    :return: the folder
    :raises ValueError: if it cannot be made, as where there is a file of that name, or if it cannot be written
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be made a folder ({error.strerror}). Name another one.") from None
    check_writable(path)
    return path


def check_writable(path: Path) -> None:
    """
    :param path: A folder, or a file that need not be there yet
    :raises ValueError: if nothing can be written there
    """
    try:
        if path.exists() and not path.is_dir():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path if path.is_dir() else path.absolute().parent).close()
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}). Name another one.") from None


def write_atomically(path: Path, data: bytes) -> None:
    """
    :param path: File to write; after a failure or a kill it has either its old or its new content
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
        # The new name is on the disk only after its folder was flushed
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def to_json(value: Any, indent: int | None = 1) -> str:
    """
    :param value: Numbers, strings and None, in lists and dictionaries
    :param indent: Spaces for each level, or None for a single line
    :return: the value as JSON that every program can read: numbers that are not finite become null
    """
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None), indent=indent)


def read_json(path: Path) -> dict[str, Any]:
    """
    :param path: JSON file
    :return: its content; empty if there is no such file
    :raises ValueError: if it is damaged
    """
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}.") from None
    except (FileNotFoundError, NotADirectoryError):
        return {}
