"""Log files that a resumed training continues: no row is missing, and none is there twice."""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import gymnasium as gym
from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

from sb3_qac.resume.state import items_by_key


def change_next_row(logger: Logger, iteration: int | None) -> None:
    """
    Change the next row that ``learn`` writes.

    :param logger: Logger of a training
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


class ResumedTensorBoard(TensorBoardOutputFormat):
    """
    Continues in an existing TensorBoard folder: rows that are already there are not written again.

    :param folder: Folder with event files
    """

    def __init__(self, folder: str) -> None:
        self.last_steps = last_steps(Path(folder))
        super().__init__(folder)

    @classmethod
    def instead_of(cls, output_format: TensorBoardOutputFormat, folder: Path) -> "ResumedTensorBoard":
        """
        :param output_format: Output that was just opened and is empty; its file is removed, and so is its folder if nothing
            else is in it
        :param folder: Folder whose logs to continue
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
            # Texts get a suffix to their tag
            tag = value.tag.removesuffix("/text_summary")
            steps[tag] = max(event.step, steps.get(tag, -1))
    return steps


def results_writers(env: VecEnv, repeated: bool = False) -> Iterator[ResultsWriter]:
    """
    :param env: Environments
    :param repeated: Whether to list the writers of ``AleVecEnv`` once for each wrapper too, as older checkpoints do
    :return: the writers of their monitor files (of ``Monitor``, ``VecMonitor`` and ``AleVecEnv``)
    """
    while True:
        # A wrapper also shows the attributes of the environment inside it
        yield from getattr(env, "_results_writers", []) if repeated else vars(env).get("_results_writers", [])
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
