"""Log files that go on where they were: no row missing, and none twice."""

import io
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.logger import KVWriter, Logger, TensorBoardOutputFormat, filter_excluded_keys
from stable_baselines3.common.monitor import ResultsWriter
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

# Column with the number of a row in W&B, where two rows may have the same step
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
    Writes rows to a run of Weights & Biases, each under its ``global_step``, and to a file from which a resumed training can
    write again those that W&B lost: offline it keeps them in memory for a while.

    :param run: Active run of W&B
    :param path: File for the rows, as JSON lines
    """

    def __init__(self, run: Any, path: Path) -> None:
        self.run = run
        self.file = open(path, "w")
        self.n_rows = 0
        self.n_rows_there = 0
        run.define_metric("*", step_metric="global_step")

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        # What TensorBoard leaves out is left out here
        values = filter_excluded_keys(key_values, key_excluded, "tensorboard")
        row = {key: np.asarray(value).item() for key, value in values.items() if isinstance(value, int | float | np.number)}
        row["global_step"], row[ROW] = step, self.n_rows
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        self._log(row)

    def _log(self, row: dict[str, Any]) -> None:
        self.n_rows = row[ROW] + 1
        if self.n_rows > self.n_rows_there:
            self.run.log(row)

    def go_on(self) -> None:
        """Log those rows of the file that the run does not have, and leave out further ones that it has."""
        self.n_rows_there = max(n_rows_online(self.run), n_rows_offline(self.run))
        for line in Path(self.file.name).read_text().splitlines():
            self._log(json.loads(line))

    def close(self) -> None:
        self.file.close()


def n_rows_online(run: Any) -> int:
    """
    :param run: Run of Weights & Biases
    :return: Number of rows that its server has
    """
    return int(run.summary.get(ROW, -1)) + 1 if run.resumed else 0


def n_rows_offline(run: Any) -> int:
    """
    :param run: Run of Weights & Biases
    :return: Number of rows that former processes kept of it on this disk
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    n_rows, current = 0, Path(run.dir).parent
    for path in current.parent.glob(f"offline-run-*-{run.id}/run-{run.id}.wandb"):
        if path.parent != current:
            for data in leveldb_records(path.read_bytes()[WANDB_HEADER_LENGTH:]):
                for item in Record.FromString(data).history.item:
                    if ROW in (item.key, "/".join(item.nested_key)):
                        n_rows = max(n_rows, int(json.loads(item.value_json)) + 1)
    return n_rows


WANDB_HEADER_LENGTH, BLOCK_LENGTH, FRAGMENT_HEADER = 7, 32768, struct.Struct("<IHB")


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """
    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md, in which W&B keeps its runs, behind a header

    :param data: Log in LevelDB's format, with the first block shorter by W&B's header
    :return: its records, without one at the end that is torn
    """
    position, parts = 0, []
    while position + FRAGMENT_HEADER.size <= len(data):
        left_in_block = BLOCK_LENGTH - (position + WANDB_HEADER_LENGTH) % BLOCK_LENGTH
        if left_in_block < FRAGMENT_HEADER.size:
            position += left_in_block
            continue
        _, length, kind = FRAGMENT_HEADER.unpack_from(data, position)
        position += FRAGMENT_HEADER.size
        parts.append(data[position : position + length])
        position += length
        # 1 is a whole record, 2, 3 and 4 the first, middle and last part of one; 0 is space not yet written
        if kind == 0 or position > len(data):
            return
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


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
