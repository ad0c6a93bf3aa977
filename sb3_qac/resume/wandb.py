"""Weights & Biases: its run is resumed too, and each row is logged once."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.logger import KVWriter, Logger, filter_excluded_keys

from sb3_qac.common.files import read_json
from sb3_qac.resume.logs import outputs_of, pack_log, unpack_log


class WandbOutputFormat(KVWriter):
    """
    Writes rows to a run of Weights & Biases, with the environment steps as W&B's own step, and keeps them, so that a resumed
    run logs again those that W&B lost.

    :param run: Active run of W&B
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self.rows: list[dict[str, Any]] = []
        # W&B has the rows below it
        self.first_step = run.step

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        # Leave out the same keys as for TensorBoard
        values = filter_excluded_keys(key_values, key_excluded, "tensorboard")
        row = {key: np.asarray(value).item() for key, value in values.items() if isinstance(value, int | float | np.number)}
        self.log({**row, "global_step": step})

    def log(self, row: dict[str, Any]) -> None:
        """:param row: Values by name, to keep and to log unless the run has them"""
        self.rows.append(row)
        if row["global_step"] >= self.first_step:
            self.run.log(row, step=row["global_step"])

    def close(self) -> None:
        """There is no file."""


def log_to_wandb(logger: Logger) -> None:
    """
    :param logger: Logger that gets an output for the active run of Weights & Biases, if there is one
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
    logger.output_formats.append(WandbOutputFormat(run))


def wandb_outputs(logger: Logger) -> list[WandbOutputFormat]:
    """
    :param logger: Logger of a run
    :return: its outputs for Weights & Biases
    """
    return outputs_of(logger, WandbOutputFormat)


def wandb_rows(logger: Logger) -> bytes | None:
    """
    :param logger: Logger of a run
    :return: the rows that W&B has got, as compressed JSON lines; None without W&B
    """
    for output in wandb_outputs(logger):
        return pack_log("\n".join(map(json.dumps, output.rows)).encode())
    return None


def restore_wandb(logger: Logger, rows: bytes | None) -> None:
    """
    :param logger: Logger of the run that resumes
    :param rows: Result of ``wandb_rows``
    """
    for output in wandb_outputs(logger):
        output.rows.clear()
        for line in unpack_log(rows).splitlines() if rows is not None else []:
            # The checkpoint may be from somebody else, and W&B takes other values for files
            output.log({key: value for key, value in json.loads(line).items() if isinstance(value, int | float)})


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
