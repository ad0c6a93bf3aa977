"""Log files that a resumed run continues: no row is missing, and none is there twice."""

import contextlib
import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

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

from sb3_qac.common.wrappers import wrappers_of
from sb3_qac.resume.checkpoints import LARGEST_RATIO, CheckpointError
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
        self.files: list[Any] = [writer.file_handler for env in envs for writer in results_writers(env)]
        for output in logger.output_formats:
            own_text = isinstance(output, HumanOutputFormat) and output.own_file
            if own_text or isinstance(output, CSVOutputFormat | JSONOutputFormat):
                self.files.append(output.file)  # type: ignore[attr-defined]
        self.folder = folder

    def state(self) -> dict[str, Any]:
        """:return: the content of the log files, and where TensorBoard's are"""
        for file in self.files:
            file.flush()
        return {
            "csv_keys": [list(output.keys) for output in self.csv_formats],
            "tensorboard": [os.path.relpath(output.writer.log_dir, self.folder) for output in self.tensorboards],
            "logs": [pack_log(Path(file.name).read_bytes()) for file in self.files],
        }

    def contents_of(self, state: dict[str, Any]) -> list[bytes]:
        """
        :param state: Result of ``state``
        :return: the content of each log file
        :raises CheckpointError: if this run has other files
        """
        logs = ("CSV logs", self.csv_formats, state["csv_keys"]), ("log files", self.files, state["logs"])
        for what, here, there in logs:
            if len(here) != len(there):
                raise CheckpointError(
                    f"{len(here)} {what} are open, but {len(there)} were at the checkpoint: give the environments "
                    "and the logger the same files."
                )
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
            resume_tensorboard(output, Path(os.path.abspath(self.folder / log_dir)), state["model"]["num_timesteps"])
        for file, content in zip(self.files, contents, strict=True):
            file.seek(0)
            file.truncate()
            file.buffer.write(content)
            file.flush()


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
        model, log_interval = self.model, self.locals["log_interval"]
        if self.offset == 0 or log_interval is None:
            return
        assert isinstance(model, OnPolicyAlgorithm)
        is_due = self.iteration % log_interval == 0

        def dump_logs(iteration: int = 0) -> None:
            del model.dump_logs
            if is_due:
                model.dump_logs(self.iteration)

        if (self.iteration - self.offset) % log_interval == 0:
            # `learn` calls it next
            model.dump_logs = dump_logs  # type: ignore[method-assign]
        elif is_due:
            model.dump_logs(self.iteration)


def resume_tensorboard(output_format: TensorBoardOutputFormat, folder: Path, steps: int) -> None:
    """
    Continue in the folder of an earlier start. TensorBoard no longer shows the rows after the checkpoint.

    :param output_format: Output that was just opened; its file is removed, and so is its folder if it is empty
    :param folder: Folder whose logs to continue, next to that of ``output_format`` or the same one. Otherwise this start was
        given another place for its logs, and a warning says so
    :param steps: Environment steps at the checkpoint
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
    assert writer.file_writer is not None
    file = Path(writer.file_writer.event_writer._file_name)
    writer.close()
    file.unlink()
    if opened != folder:
        # Not if something else is in it
        with contextlib.suppress(OSError):
            opened.rmdir()
    type(writer).__init__(writer, log_dir=str(folder), purge_step=steps + 1)


def results_writers(env: VecEnv) -> Iterator[ResultsWriter]:
    """
    :param env: Environments
    :return: the writers of their monitor files (of ``Monitor``, ``VecMonitor`` and ``AleVecEnv``)
    """
    layers: list[Any] = [env]
    while isinstance(env, VecEnvWrapper):
        env = env.venv
        layers.append(env)
    # In a `VecEnv` of one's own it may be anything
    for single in items_by_key(getattr(env, "envs", None)).values():
        layers += wrappers_of(single)
    for layer in layers:
        # Not `getattr`: a wrapper also shows the attributes of the environment inside it
        writers = [vars(layer).get("results_writer"), *vars(layer).get("_results_writers", [])]
        yield from (writer for writer in writers if writer is not None)


def pack_log(content: bytes) -> bytes:
    """
    :param content: Content of a log file
    :return: the content, compressed so far as ``unpack_log`` allows
    """
    packed = zlib.compress(content, 1)
    return packed if len(content) <= LARGEST_RATIO * len(packed) else zlib.compress(content, 0)


def unpack_log(packed: bytes) -> bytes:
    """
    :param packed: Result of ``pack_log``, or bytes of somebody else
    :return: the content
    :raises CheckpointError: if it is damaged, or more than ``LARGEST_RATIO`` times as long
    """
    decompressor = zlib.decompressobj()
    with contextlib.suppress(zlib.error):
        content = decompressor.decompress(packed, LARGEST_RATIO * len(packed))
        if decompressor.eof:
            return content
    raise CheckpointError(f"The checkpoint has a log file that is damaged, or more than {LARGEST_RATIO} times as long there.")
