"""Log files that a resumed run continues: no row is missing, and none is there twice."""

import contextlib
import io
import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import gymnasium as gym
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import (
    CSVOutputFormat,
    HumanOutputFormat,
    JSONOutputFormat,
    KVWriter,
    Logger,
    TensorBoardOutputFormat,
)
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

from sb3_qac.resume.checkpoints import LARGEST_RATIO, CheckpointError
from sb3_qac.resume.identity import check_same_number
from sb3_qac.resume.state import is_plain, items_by_key

Output = TypeVar("Output", bound=KVWriter)
# Attributes of the logger: what was recorded and not yet written
LOGGED = ("name_to_value", "name_to_count", "name_to_excluded")


class Logs:
    """
    The log files of a run.

    :param logger: Its logger
    :param envs: All its environments
    :param folder: Folder of its checkpoints
    """

    def __init__(self, logger: Logger, envs: Sequence[VecEnv], folder: Path) -> None:
        self.csv_formats = outputs_of(logger, CSVOutputFormat)
        self.tensorboards = outputs_of(logger, TensorBoardOutputFormat)
        # What monitors and the logger append to
        self.files = [writer.file_handler for env in envs for writer in results_writers(env)]
        for output in logger.output_formats:
            own_text = isinstance(output, HumanOutputFormat) and output.own_file
            if own_text or isinstance(output, CSVOutputFormat | JSONOutputFormat):
                self.files.append(output.file)  # type: ignore[attr-defined]
        self.folder = folder

    def state(self) -> dict[str, Any]:
        """:return: the content of the log files, and where TensorBoard's are"""
        log_dirs = [Path(output.writer.log_dir) for output in self.tensorboards]
        for log_dir in log_dirs:
            sync_files(log_dir)
        return {
            "csv_keys": [list(output.keys) for output in self.csv_formats],
            "tensorboard": [os.path.relpath(log_dir, self.folder) for log_dir in log_dirs],
            "logs": [pack_log(read_log(file)) for file in self.files],
        }

    def contents_of(self, state: dict[str, Any]) -> list[bytes]:
        """
        :param state: Result of ``state``
        :return: the content of each log file
        :raises CheckpointError: if this run has other files
        """
        check_same_number("CSV logs are open", self.csv_formats, state["csv_keys"], "give the logger the same outputs")
        advice = "give the environments and the logger the same files"
        check_same_number("log files are open", self.files, state["logs"], advice)
        return [unpack_log(packed) for packed in state["logs"]]

    def restore(self, state: dict[str, Any], contents: list[bytes]) -> None:
        """
        :param state: Result of ``state``
        :param contents: Result of ``contents_of``
        """
        for csv_format, keys in zip(self.csv_formats, state["csv_keys"], strict=True):
            csv_format.keys = keys
        for output, log_dir in zip(self.tensorboards, state["tensorboard"], strict=False):
            # Without a look at the disk, as it was made: ".." behind a symbolic link leads elsewhere
            resume_tensorboard(output, Path(os.path.abspath(self.folder / log_dir)))
        for file, content in zip(self.files, contents, strict=True):
            rewrite_log(file, content)


def outputs_of(logger: Logger, kind: type[Output]) -> list[Output]:
    """
    :param logger: A logger
    :param kind: Class of an output
    :return: the logger's outputs of this class
    """
    return [output for output in logger.output_formats if isinstance(output, kind)]


def rows_state(logger: Logger) -> dict[str, dict[str, Any]]:
    """
    :param logger: Logger of a run
    :return: the rows that were recorded and not yet written, by attribute of the logger, as far as they are plain data
    """
    return {name: {key: value for key, value in getattr(logger, name).items() if is_plain(value)} for name in LOGGED}


def restore_rows(logger: Logger, rows: dict[str, dict[str, Any]]) -> None:
    """
    :param logger: Logger of the run that resumes
    :param rows: Result of ``rows_state``. It has no figures, videos and lists of hyperparameters, but where those that were
        still to be written were to go.
    """
    kept = rows["name_to_value"].keys()
    lost = rows["name_to_excluded"].keys() - kept
    for name in LOGGED:
        recorded, values = getattr(logger, name), rows[name]
        # This start may have recorded them again
        again = {key: recorded[key] for key in lost if key in recorded}
        recorded.clear()
        recorded.update({key: value for key, value in values.items() if key in kept})
        recorded.update(again)


class LogIntervalCallback(BaseCallback):
    """
    Writes the log of a resumed run at the right iterations. ``learn`` counts its iterations from 0 again, so it would write
    the log at the wrong ones and with the wrong number.
    """

    def __init__(self) -> None:
        super().__init__()
        # Iterations before this start, and until now
        self.offset = self.iteration = 0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.iteration += 1
        log_interval = self.locals["log_interval"]
        if self.offset == 0 or log_interval is None:
            return
        assert isinstance(self.model, OnPolicyAlgorithm)
        is_written = (self.iteration - self.offset) % log_interval == 0
        if self.offset % log_interval == 0 and is_written:
            change_next_row(self.logger, self.iteration)
            return
        if self.iteration % log_interval == 0:
            self.model.dump_logs(self.iteration)
        if is_written:
            change_next_row(self.logger, None)


def change_next_row(logger: Logger, iteration: int | None) -> None:
    """
    Change the next row that ``learn`` writes.

    :param logger: Logger of a run
    :param iteration: Number of the row; None to leave it out. What was recorded for it before ``learn`` begins to write it
        then stays for the next one.
    """
    # Those that the user has set on the logger itself
    before: dict[str, Any] = {name: vars(logger)[name] for name in ("record", "dump") if name in vars(logger)}
    record_unchanged, is_left_out = logger.record, False

    def record(key: str, value: Any, exclude: str | tuple[str, ...] | None = None) -> None:
        nonlocal is_left_out
        # What SB3's `dump_logs` records first
        if key == "time/iterations":
            value, is_left_out = iteration, iteration is None
        if not is_left_out:
            record_unchanged(key, value, exclude)

    def dump(step: int = 0) -> None:
        del logger.record, logger.dump
        vars(logger).update(before)
        if iteration is not None:
            logger.dump(step)

    # On this one logger, because its class may be the user's
    logger.record = record  # type: ignore[method-assign]
    logger.dump = dump  # type: ignore[method-assign]


def resume_tensorboard(output_format: TensorBoardOutputFormat, folder: Path) -> None:
    """
    Continue in the folder of an earlier start, without writing again what is already there.

    :param output_format: Output that was just opened; its file is removed if it is empty, and so is its folder
    :param folder: Folder whose logs to continue, next to that of ``output_format`` or the same one. Otherwise this start was
        given another place for its logs, and a warning says so
    """
    # The writer stays the same object, because callbacks may have it
    writer = output_format.writer
    opened = Path(os.path.abspath(writer.log_dir))
    if not folder.is_dir() or folder.parent.resolve() != opened.parent.resolve():
        warnings.warn(
            f"TensorBoard's rows from here on are in {opened}, and those before were in {folder}. To have them in one folder, "
            "give the earlier `tensorboard_log`.",
            stacklevel=2,
        )
        return
    folder = opened.parent / folder.name
    writer.close()
    for path in opened.glob(f"events.out.tfevents.*.{os.getpid()}.*"):
        if not last_steps_of(path):
            path.unlink()
    if opened != folder:
        # Not if something else is in it
        with contextlib.suppress(OSError):
            opened.rmdir()
    there = last_steps(folder)
    # Opens it anew
    type(writer).__init__(writer, log_dir=str(folder))
    file_writer = writer.file_writer
    assert file_writer is not None
    add_event = file_writer.add_event

    def add_new(event: Any, step: int | None = None, walltime: float | None = None) -> None:
        if step is not None and event.HasField("summary"):
            new = [value for value in event.summary.value if there.get(value.tag, -1) < step]
            del event.summary.value[:]
            event.summary.value.extend(new)
            if not new:
                return
        add_event(event, step, walltime)

    file_writer.add_event = add_new


def last_steps(folder: Path) -> dict[str, int]:
    """
    :param folder: Folder with event files
    :return: for each tag, the last step that was written
    """
    steps: dict[str, int] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for tag, step in last_steps_of(path).items():
            steps[tag] = max(step, steps.get(tag, -1))
    return steps


def last_steps_of(path: Path) -> dict[str, int]:
    """
    :param path: Event file, whose end may be incomplete
    :return: for each tag, the last step that was written
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    steps: dict[str, int] = {}
    for event in LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            steps[value.tag] = max(event.step, steps.get(value.tag, -1))
    return steps


def results_writers(env: VecEnv) -> Iterator[ResultsWriter]:
    """
    :param env: Environments
    :return: the writers of their monitor files (of ``Monitor``, ``VecMonitor`` and ``AleVecEnv``)
    """
    while True:
        # Not `getattr`: a wrapper also shows the attributes of the environment inside it
        yield from vars(env).get("_results_writers", [])
        if vars(env).get("results_writer") is not None:
            yield vars(env)["results_writer"]
        if not isinstance(env, VecEnvWrapper):
            break
        env = env.venv
    # In a `VecEnv` of one's own it may be anything
    for layer in items_by_key(getattr(env, "envs", None)).values():
        while isinstance(layer, gym.Wrapper):
            if vars(layer).get("results_writer") is not None:
                yield vars(layer)["results_writer"]
            layer = layer.env


def pack_log(content: bytes) -> bytes:
    """
    :param content: Content of a log file
    :return: the content, compressed so far as ``unpack_log`` allows
    """
    packed = zlib.compress(content, 1)
    return packed if len(content) <= LARGEST_RATIO * len(packed) else zlib.compress(content, 0)


def unpack_log(packed: bytes) -> bytes:
    """
    :param packed: Result of ``pack_log``, as a file says that may be anybody's
    :return: the content
    :raises CheckpointError: if it is damaged, or is more than ``LARGEST_RATIO`` times as long
    """
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(packed, LARGEST_RATIO * len(packed) + 1)
    except zlib.error as error:
        raise CheckpointError(f"The checkpoint has a damaged log file ({error}).") from None
    if not decompressor.eof or len(content) > LARGEST_RATIO * len(packed):
        raise CheckpointError(
            f"The checkpoint has a log file that is incomplete, or more than {LARGEST_RATIO} times as long as what it was "
            "compressed to, which sb3_qac does not write."
        )
    return content


def read_log(file: IO[str]) -> bytes:
    """
    :param file: File that is open for writing
    :return: Its content
    """
    file.flush()
    return Path(file.name).read_bytes()


def rewrite_log(file: IO[str], content: bytes) -> None:
    """
    :param file: File that is open for writing
    :param content: New content; later writes are appended to it
    """
    assert isinstance(file, io.TextIOWrapper)
    file.seek(0)
    file.truncate()
    file.buffer.write(content)
    file.flush()


def sync_files(folder: Path) -> None:
    """
    :param folder: Folder whose files are flushed from the operating system to the disk
    """
    for path in folder.iterdir():
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
