"""Weights & Biases: its run is resumed too, and each row is logged once."""

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from stable_baselines3.common.logger import KVWriter, Logger, filter_excluded_keys

from sb3_qac.common.files import read_json
from sb3_qac.resume.logs import outputs_of, pack_log, read_log, rewrite_log, unpack_log

# Column of the file with the number of a row in W&B
ROW = "time/row"
# For each run, the row that comes next in each file, as far as this process logged them
LOGGED: WeakKeyDictionary[Any, dict[Path, int]] = WeakKeyDictionary()


class WandbOutputFormat(KVWriter):
    """
    Writes rows to a run of Weights & Biases and to a file. From the file, a resumed run logs again the rows that W&B
    lost.

    A row's number is its step in W&B, so that each row appears once: a resumed W&B run gives the step at which it starts, and
    drops rows below it. The run's own step is ``global_step``, which two rows may share.

    :param run: Active run of W&B
    :param path: File for the rows, as JSON lines
    """

    def __init__(self, run: Any, path: Path) -> None:
        self.run = run
        self.file = open(path, "w")
        self.next_row = 0
        # The first row that the run does not have
        self.first_row = run.starting_step
        run.define_metric("*", step_metric="global_step")

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        # Leave out the same keys as for TensorBoard
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
        :return: the number that was used; a later one if something else has logged to the run as well
        """
        # W&B would drop an earlier row too, but would print a line for each
        if number >= self.first_row:
            # Under heavy load W&B does not answer in time
            with contextlib.suppress(TimeoutError):
                number = max(number, self.run.step)
            self.run.log(row, step=number, commit=True)
            LOGGED.setdefault(self.run, {})[Path(self.file.name)] = number + 1
        self.next_row = number + 1
        return number

    def log_again(self) -> None:
        """Log those rows of the file that the run does not have."""
        # `learn` may have been called before in this process, or ended in an error
        self.first_row = max(self.first_row, LOGGED.get(self.run, {}).get(Path(self.file.name), 0))
        for line in Path(self.file.name).read_text().splitlines():
            # The checkpoint may be from somebody else, and W&B takes other values for files
            row = {key: value for key, value in json.loads(line).items() if isinstance(value, int | float)}
            self._log(row, int(row.pop(ROW)))

    def close(self) -> None:
        self.file.close()


def log_to_wandb(logger: Logger, folder: Path) -> None:
    """
    :param logger: Logger that gets an output for the active run of Weights & Biases, if there is one
    :param folder: Folder of checkpoints, for the file of its rows
    """
    run = active_wandb_run()
    if run is None or wandb_outputs(logger):
        return
    if run.settings.sync_tensorboard and sys.modules["wandb"].patched["tensorboard"]:
        warnings.warn(
            "Weights & Biases copies the rows of TensorBoard, which loses some when the process is killed. Leave "
            "`sync_tensorboard=True` out: with ExactCheckpointCallback all rows are logged anyway.",
            stacklevel=2,
        )
        return
    logger.output_formats.append(WandbOutputFormat(run, folder / "wandb.jsonl"))


def wandb_outputs(logger: Logger) -> list[WandbOutputFormat]:
    """
    :param logger: Logger of a run
    :return: its outputs for Weights & Biases
    """
    return outputs_of(logger, WandbOutputFormat)


def rows_of_wandb(logger: Logger, earlier: bytes | None) -> bytes | None:
    """
    :param logger: Logger of a run
    :param earlier: Rows of an earlier start
    :return: the rows that W&B has got, compressed; the earlier ones if this start has no run of W&B
    """
    for output in wandb_outputs(logger):
        return pack_log(read_log(output.file))
    return earlier


def restore_wandb(logger: Logger, rows: bytes | None, are_of_last_start: bool) -> None:
    """
    :param logger: Logger of the run that resumes
    :param rows: Result of ``rows_of_wandb``
    :param are_of_last_start: Whether the last start logged them, and not one before it
    """
    for output in wandb_outputs(logger):
        if rows is not None:
            rewrite_log(output.file, unpack_log(rows))
        output.log_again()
        if not are_of_last_start:
            # The run may have rows of a start before that one. Those that follow are not the same rows
            output.next_row = max(output.next_row, output.first_row)


def wandb_run_id(folder: str | os.PathLike) -> str | None:
    """
    For ``wandb.init(id=wandb_run_id("runs/pong"), resume="allow")``, which resumes the run.

    :param folder: Folder of checkpoints
    :return: id of the W&B run that belongs to it; None if there is none yet
    """
    run = read_json(Path(folder, "run.json")).get("wandb")
    return None if run is None else run["id"]


def active_wandb_run() -> Any:
    """:return: the active run of Weights & Biases; None if there is none, it is disabled, or W&B is not imported"""
    run = getattr(sys.modules.get("wandb"), "run", None)
    return None if run is None or run.disabled else run


def wandb_identity() -> dict[str, str] | None:
    """:return: id, project and entity of the active run of Weights & Biases; None if there is none"""
    run = active_wandb_run()
    return None if run is None else {"id": run.id, "project": run.project, "entity": run.entity}
