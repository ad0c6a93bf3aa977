"""Weights & Biases: its run is resumed too, and each row is logged once."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from stable_baselines3.common.logger import KVWriter, filter_excluded_keys

from sb3_qac.common.files import read_json

# Column of the file with the number of a row in W&B
ROW = "time/row"
# For each run, the row that comes next in each file, as far as this process logged them
LOGGED: WeakKeyDictionary[Any, dict[Path, int]] = WeakKeyDictionary()


class WandbOutputFormat(KVWriter):
    """
    Writes rows to a run of Weights & Biases and to a file. From the file, a resumed training logs again the rows that W&B
    lost.

    A row's number is its step in W&B, so that each row appears once: a resumed W&B run gives the step at which it starts, and
    drops rows below it. The training's own step is ``global_step``, which two rows may share.

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


def wandb_run_id(folder: str | os.PathLike) -> str | None:
    """
    For ``wandb.init(id=wandb_run_id("runs/pong"), resume="allow")``, which resumes the run.

    :param folder: Folder of checkpoints
    :return: id of the training's run of Weights & Biases; None if there is none yet
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
