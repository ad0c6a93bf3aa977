"""
Reads packed studies. A packed study is a few small files instead of a folder for each run, so that a repository can keep it: a
row for each run in ``runs.csv``, their settings in ``settings.json``, a row for each evaluation episode in
``evaluations.csv.xz``, thinned curves in ``curves.csv.xz``, and ``diagnosis.json``.
"""

import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_qac.common.files import read_json
from sb3_qac.study.records import SUMMARY_METRICS, Record

RUNS_FILE, SETTINGS_FILE, EVALUATIONS_FILE, CURVES_FILE, DIAGNOSIS_FILE = (
    "runs.csv",
    "settings.json",
    "evaluations.csv.xz",
    "curves.csv.xz",
    "diagnosis.json",
)
# Entries of `run.json` that have a column of their own
COLUMNS = {
    "name": "name",
    "env_id": "environment",
    "group": "group",
    "algo": "algo",
    "seed": "seed",
    "commit": "commit",
}
# States of a run that has come to its end
ENDED = ("finished", "stopped")
# An empty field is no value. Not "None" or "NA", which may be the name of a study
NO_VALUE = [""]


def check_different_runs(records: Sequence[Record]) -> None:
    """
    :param records: Records of a part of a study
    :raises ValueError: if two are runs of the same algorithm with the same seed on the same environment
    """
    paths: dict[tuple[Any, ...], str] = {}
    for record in records:
        env_id, group, seed = (record.settings[name] for name in ("env_id", "group", "seed"))
        other = paths.setdefault((env_id, group, seed), record.path)
        if other != record.path:
            raise ValueError(
                f"{other} and {record.path} are both the run of {group} on {env_id} with seed {seed}, and would count twice. "
                "If one is a copy of the other, delete it. Otherwise move it into a folder of its own, as another part."
            )


def find_pack(folder: Path) -> tuple[Path, str] | None:
    """
    :param folder: Folder of a packed study, or the path of a part of one
    :return: folder of the packed study, and the part; None if there is no packed study
    """
    for parent in (folder, *folder.parents):
        # Above the folder, other programs' tables may have this name
        if (parent / RUNS_FILE).is_file() and (parent == folder or (parent / SETTINGS_FILE).is_file()):
            part = folder.relative_to(parent).as_posix()
            return parent, "" if part == "." else part
    return None


def load_pack(folder: Path, part: str = "") -> list[Record]:
    """
    :param folder: Folder of a packed study
    :param part: Part of the study, "" for the study itself
    :return: records of its runs; none if there is no such part
    :raises ValueError: if a file of it is missing or damaged
    """
    try:
        return _load_pack(folder, part)
    except (OSError, EOFError, lzma.LZMAError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"The packed study in {folder} cannot be read, because a file is missing or damaged ({type(error).__name__}: "
            f"{error}). Pack it again, or take the files from the repository."
        ) from error


def _load_pack(folder: Path, part: str) -> list[Record]:
    text = dict.fromkeys(("study", "run", "name", "environment", "group", "algo", "commit", "settings"), str)
    runs = pd.read_csv(folder / RUNS_FILE, float_precision="round_trip", dtype=text, keep_default_na=False, na_values=NO_VALUE)
    runs = runs[parts_of(runs) == part]
    evaluations, curves = (by_run(folder / name) for name in (EVALUATIONS_FILE, CURVES_FILE))
    if gone := [run for run, n in zip(runs["run"], runs["evaluations"], strict=True) if n > 0 and run not in evaluations]:
        raise ValueError(f"there are no evaluations of {gone[0]} in {EVALUATIONS_FILE}")
    diagnoses = read_json(folder / DIAGNOSIS_FILE)
    settings = json.loads((folder / SETTINGS_FILE).read_text())
    if isinstance(settings, list):
        # 0.1.0 numbered them
        settings = {str(number): of_runs for number, of_runs in enumerate(settings)}
    # Numbers and strings of Python, and None where there is none
    rows = [{name: None if pd.isna(x) else x for name, x in row.items()} for row in runs.astype(object).to_dict("records")]
    return [
        _record_of(
            {**row, "settings": settings[row["settings"]]},
            folder,
            evaluations.get(str(row["run"])),
            curves.get(str(row["run"])),
            diagnoses.get(str(row["run"]), []),
        )
        for row in rows
    ]


def parts_of(runs: pd.DataFrame) -> pd.Series:
    """:return: part of the study of each packed run, "" for the study itself"""
    return runs["study"].map(lambda study: study.partition("/")[2])


def by_run(path: Path) -> dict[str, pd.DataFrame]:
    """
    :param path: A table with a column ``run``
    :return: its rows by run; empty if there is no such file
    """
    if not path.is_file():
        return {}
    table = pd.read_csv(path, float_precision="round_trip", dtype={"run": str}, keep_default_na=False, na_values=NO_VALUE)
    return {str(run): of_run for run, of_run in table.groupby("run", sort=False)}


def _record_of(
    row: dict[str, Any],
    folder: Path,
    evaluations: pd.DataFrame | None,
    curves: pd.DataFrame | None,
    diagnosis: list[dict[str, Any]],
) -> Record:
    settings = {**row["settings"], **{name: row[column] for name, column in COLUMNS.items()}}
    state = row["state"]
    status = {"steps": row["steps"], "seconds": row["seconds"], "finished": state in ENDED}
    status |= {"failed": state == "failed", "lost": state == "lost"}
    timesteps, returns, lengths = np.zeros(0, dtype=int), np.zeros((0, 1)), None
    if evaluations is not None:
        timesteps = evaluations["steps"].unique()
        returns, lengths = (evaluations[name].to_numpy(float).reshape(len(timesteps), -1) for name in ("return", "length"))
    return Record(
        path=row["run"],
        folder=folder / row["run"],
        settings={**settings, "command": row["command"]},
        status=status,
        timesteps=timesteps,
        returns=returns,
        lengths=None if lengths is None or np.isnan(lengths).any() else lengths,
        curves={} if curves is None else _series(curves.drop(columns="run").set_index("step")),
        diagnosis=diagnosis,
        metrics={name: row[name] for name in SUMMARY_METRICS if row.get(name) is not None},
    )


def _series(table: pd.DataFrame) -> dict[str, pd.Series]:
    return {str(tag): table[tag].dropna() for tag in table if table[tag].notna().any()}
