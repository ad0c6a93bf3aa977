"""Log files that a resumed training continues: no row is missing, and none is there twice."""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.logger import KVWriter, Logger, TensorBoardOutputFormat, filter_excluded_keys
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

# Column of the file with the number of a row in W&B
ROW = "time/row"


class ContinuedLogger(Logger):
    """
    Logger of a resumed training, which can be told to leave out a row.

    :param logger: The logger that it takes the place of, whose rows are not yet written
    """

    def __init__(self, logger: Logger) -> None:
        super().__init__(logger.dir, logger.output_formats)
        self.level = logger.level
        # While it holds, nothing is recorded until the next row would be written, which is not
        self.hold = False

    def record(self, key: str, value: Any, exclude: str | tuple[str, ...] | None = None) -> None:
        if not self.hold:
            super().record(key, value, exclude)

    def dump(self, step: int = 0) -> None:
        if self.hold:
            self.hold = False
        else:
            super().dump(step)


class ContinuedTensorBoard(TensorBoardOutputFormat):
    """
    Goes on in a folder of TensorBoard's: what stands there already is not written again.

    :param folder: Folder with event files
    """

    def __init__(self, folder: str) -> None:
        self.last_steps = last_steps(Path(folder))
        super().__init__(folder)

    @classmethod
    def instead_of(cls, output_format: TensorBoardOutputFormat, folder: Path) -> "ContinuedTensorBoard":
        """
        :param output_format: Output that was just opened and is empty; its file is removed, and its folder if it is empty then
        :param folder: Folder to go on in
        :return: Output into the folder
        """
        opened = Path(output_format.writer.log_dir)
        output_format.close()
        for path in opened.glob(f"events.out.tfevents.*.{os.getpid()}.*"):
            if not last_steps_of(path):
                path.unlink()
        if opened.resolve() != folder.resolve() and not any(opened.iterdir()):
            os.removedirs(opened)
        return cls(str(folder))

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        new = {key: value for key, value in key_values.items() if self.last_steps.get(key, -1) < step}
        super().write(new, {key: key_excluded[key] for key in new}, step)


class WandbOutputFormat(KVWriter):
    """
    Writes rows to a run of Weights & Biases, and to a file from which a resumed training logs again those that W&B lost.

    A row's number is its step in W&B, so that each row is there once: a run that W&B resumed tells the step that it starts
    at, and drops rows below. The training's own step is ``global_step``, which two rows may have in common.

    :param run: Active run of W&B
    :param path: File for the rows, as JSON lines
    """

    def __init__(self, run: Any, path: Path) -> None:
        self.run = run
        self.file = open(path, "w")
        self.next_row = 0
        run.define_metric("*", step_metric="global_step")

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        # What TensorBoard leaves out is left out here
        values = filter_excluded_keys(key_values, key_excluded, "tensorboard")
        row = {key: np.asarray(value).item() for key, value in values.items() if isinstance(value, int | float | np.number)}
        row["global_step"] = step
        row[ROW] = self._log(row, self.next_row)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def _log(self, row: dict[str, Any], number: int) -> int:
        """
        :param row: Values by name
        :param number: Its number
        :return: the number that it got: a later one if something else has logged to the run as well
        """
        # W&B would drop it too, with a line on the screen for each
        if number >= self.run.starting_step:
            # Under heavy load W&B does not answer in time
            with contextlib.suppress(TimeoutError):
                number = max(number, self.run.step)
            self.run.log(row, step=number, commit=True)
        self.next_row = number + 1
        return number

    def log_again(self) -> None:
        """Log those rows of the file that the run does not have."""
        for line in Path(self.file.name).read_text().splitlines():
            row = json.loads(line)
            self._log(row, row.pop(ROW))

    def close(self) -> None:
        self.file.close()


def last_steps(folder: Path) -> dict[str, int]:
    """
    :param folder: Folder with event files
    :return: the last step that each tag was written for
    """
    steps: dict[str, int] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for tag, step in last_steps_of(path).items():
            steps[tag] = max(step, steps.get(tag, -1))
    return steps


def last_steps_of(path: Path) -> dict[str, int]:
    """
    :param path: Event file, the end of which may be torn
    :return: the last step that each tag was written for
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    steps: dict[str, int] = {}
    for event in LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            # Texts get a suffix to their tag
            tag = value.tag.removesuffix("/text_summary")
            steps[tag] = max(event.step, steps.get(tag, -1))
    return steps


def results_writers(env: VecEnv, repeated: bool = False) -> Iterator[ResultsWriter]:
    """
    :param env: Environments
    :param repeated: Whether those of ``AleVecEnv`` come once for each wrapper too, as they do in older checkpoints
    :return: the writers of their monitor files, those of ``Monitor``, ``VecMonitor`` and ``AleVecEnv``
    """
    while True:
        # A wrapper has the attributes of what it wraps
        yield from getattr(env, "_results_writers", []) if repeated else vars(env).get("_results_writers", [])
        if vars(env).get("results_writer") is not None:
            yield vars(env)["results_writer"]
        if not isinstance(env, VecEnvWrapper):
            break
        env = env.venv
    for single_env in getattr(env, "envs", []):
        layer: gym.Env = single_env
        while isinstance(layer, gym.Wrapper):
            if vars(layer).get("results_writer") is not None:
                yield vars(layer)["results_writer"]
            layer = layer.env


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
    :param content: What it shall contain, with further writes behind it
    """
    assert isinstance(file, io.TextIOWrapper)
    file.seek(0)
    file.truncate()
    file.buffer.write(content)
    file.flush()


def sync_files(folder: Path) -> None:
    """
    :param folder: Folder whose files shall be on the disk, not only with the operating system
    """
    for path in folder.iterdir():
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
