"""The folder of a run's checkpoints, for one process at a time."""

from pathlib import Path

from filelock import FileLock, Timeout

from sb3_qac.common.files import make_folder
from sb3_qac.resume.checkpoints import CheckpointError


def lock_of(folder: Path) -> FileLock:
    """
    :param folder: Folder of checkpoints
    :return: the lock of the process that trains there, the same object for every spelling of the folder
    """
    return FileLock(folder.resolve() / "lock", is_singleton=True)


def take_folder(folder: Path) -> FileLock:
    """
    :param folder: Folder of checkpoints; it is made if it is not there
    :return: its lock, which is ours now
    :raises CheckpointError: if another process has it
    """
    lock = lock_of(make_folder(folder))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise CheckpointError(
            f"Another process is training in {folder}, or was stopped there and is still open, such as a notebook: wait "
            "for it, close it, or use another folder."
        ) from None
    return lock
