"""
Writes a study as a few small files, so that a repository can keep it. The same study gives the same bytes.

    python -m benchmarks.pack studies/pong --output results/pong
"""

import argparse
import contextlib
import hashlib
import json
import lzma
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_qac.common.checks import check_integer
from sb3_qac.common.files import make_folder, read_json
from sb3_qac.study.catalogue import TASKS, field_name
from sb3_qac.study.loading import check_no_run, check_one_form, is_run, load_run, part_of
from sb3_qac.study.pack import (
    COLUMNS,
    CURVES_FILE,
    DIAGNOSIS_FILE,
    ENDED,
    EVALUATIONS_FILE,
    RUNS_FILE,
    SETTINGS_FILE,
    by_run,
    check_different_runs,
    load_pack,
    parts_of,
)
from sb3_qac.study.records import SUMMARY_METRICS, Record, records_of
from sb3_qac.study.run import env_dirname
from sb3_qac.study.statistics import standard_error

# Largest number of rows of a run in `curves.csv.xz`
N_POINTS = 100
# Half the size of gzip, and no time in the header: the same table gives the same bytes
XZ: Any = {"method": "xz", "preset": 9}
# Significant digits of the figures in `runs.csv` and `diagnosis.json`. The evaluations are exact.
N_DIGITS = 6
# Options of `study` by setting of a run, with the value for which the option is omitted
OPTIONS = {
    "n_timesteps": ("--steps", 0),
    "stop_return": ("--stop-return", None),
    "eval_freq": ("--eval-freq", None),
    "eval_from": ("--eval-from", None),
    "n_eval_episodes": ("--eval-episodes", 30),
    "dtype": ("--dtype", "float32"),
    "config": ("--conf-file", None),
    "n_threads": ("--threads", 1),
    "device": ("--device", "auto"),
    "wandb": ("--wandb", "offline"),
}


def write_pack(
    parts: dict[str, list[Record]],
    output: Path,
    lost: Sequence[str] = (),
    n_points: int = N_POINTS,
    kept: Sequence[str] = (),
) -> list[Path]:
    """
    :param parts: Records by part of the study; "" for the study itself
    :param output: Folder for the files
    :param lost: Paths of runs that were lost with their machine
    :param n_points: Rows of a run in ``curves.csv.xz`` at most
    :param kept: Paths of runs whose curves are written as they are, because they may be kept nowhere else
    :return: the files
    :raises ValueError: if there is no such run, a lost run finished, or a run is there twice
    """
    records = records_of(parts)
    _check_lost(lost, records)
    for of_part in parts.values():
        check_different_runs(of_part)
    for record in records:
        record.status["lost"] = record.path in lost or bool(record.status.get("lost"))
    make_folder(output)
    rows = [
        row_of(record, f"{output.resolve().name}/{part}".rstrip("/")) for part, of_part in parts.items() for record in of_part
    ]
    tables = {
        EVALUATIONS_FILE: ([evaluations_of(record) for record in records if len(record.timesteps)], None),
        CURVES_FILE: (
            [thinned(record, None if record.path in kept else n_points) for record in records if record.curves],
            "%.5g",
        ),
    }
    diagnoses = {record.path: rounded(record.diagnosis) for record in records if record.diagnosis}
    settings = shared_settings(rows)
    # `runs.csv` comes last: without it, the others are no packed study
    names = (*tables, DIAGNOSIS_FILE, SETTINGS_FILE, RUNS_FILE)
    # All files are complete before the first is replaced, because packed runs may be kept nowhere else
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        new = Path(scratch)
        for name, (of_runs, float_format) in tables.items():
            if of_runs:
                table = pd.concat(of_runs, ignore_index=True)
                if name == EVALUATIONS_FILE:
                    # Whole numbers have no ".0"
                    table = table.convert_dtypes()
                table.to_csv(new / name, index=False, float_format=float_format, compression=XZ, lineterminator="\n")
        if diagnoses:
            lines = [f"{json.dumps(path)}: {json.dumps(points)}" for path, points in diagnoses.items()]
            (new / DIAGNOSIS_FILE).write_text("{\n" + ",\n".join(lines) + "\n}\n")
        (new / SETTINGS_FILE).write_text(json.dumps(settings, indent=1) + "\n")
        pd.DataFrame(rounded(rows)).convert_dtypes().to_csv(new / RUNS_FILE, index=False, lineterminator="\n")
        for name in names:
            if (new / name).is_file():
                (new / name).replace(output / name)
            else:
                (output / name).unlink(missing_ok=True)
    return [output / name for name in (RUNS_FILE, SETTINGS_FILE, *tables, DIAGNOSIS_FILE) if (output / name).is_file()]


def load_everything(folder: Path) -> dict[str, list[Record]]:
    """
    :param folder: Folder with the folders of runs, at any depth, or of a packed study
    :return: records of all runs, by the part of the study to which they belong: "" for the study itself, or the path of the
        folder for a different study inside it, such as "lin_7e-4"
    :raises ValueError: if there are none, or some are packed and others are not
    """
    check_no_run(folder)
    parts: dict[str, list[Record]] = {}
    runs = list(all_runs(folder))
    check_one_form(folder, runs)
    for run in runs:
        record = replace(load_run(run), path=run.relative_to(folder).as_posix())
        parts.setdefault(part_of(folder, run, record.settings["env_id"]), []).append(record)
    parts = parts or load_packed_parts(folder)
    if not parts:
        raise ValueError(f"There is no run of a study in {folder}. `python -m sb3_qac study` creates one.")
    return dict(sorted(parts.items()))


def all_runs(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """
    :param folder: A folder
    :param above: Folders above it, without symbolic links
    :return: folders of all runs in it, at any depth
    """
    if is_run(folder / "run.json"):
        yield folder
        return
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        # It is not there, or another user's
        return
    above = (*above, folder.resolve())
    for path in inside:
        # A link may lead back
        if path.is_dir() and path.resolve() not in above:
            yield from all_runs(path, above)


def load_packed_parts(folder: Path) -> dict[str, list[Record]]:
    """
    :param folder: Folder of a packed study; it need not exist
    :return: records of its runs by part of the study, "" for the study itself
    :raises ValueError: if a file of it is missing or damaged
    """
    parts = sorted(packed_runs(folder)["part"].unique())
    return {part: load_pack(folder, part) for part in parts}


def packed_runs(folder: Path) -> pd.DataFrame:
    """
    :param folder: Folder of a packed study; it need not exist
    :return: a row for each packed run, with its ``part`` of the study, its path, ``run``, its ``environment``, ``state``,
        ``steps`` and number of ``evaluations``
    :raises ValueError: if the table of runs is damaged
    """
    path, columns = folder / RUNS_FILE, ["study", "run", "environment", "state", "steps", "evaluations"]
    if not path.is_file():
        return pd.DataFrame(columns=[*columns, "part"])
    try:
        runs = pd.read_csv(path, usecols=columns, dtype=str, keep_default_na=False)
        return runs.assign(part=parts_of(runs))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Take it from the repository, or delete it to pack again.") from None


def _check_lost(lost: Sequence[str], records: Sequence[Record]) -> None:
    unknown = set(lost) - {record.path for record in records}
    if unknown:
        raise ValueError(f"There is no run {', '.join(sorted(unknown))} among {', '.join(x.path for x in records)}.")
    finished = [record.path for record in records if record.path in lost and record.finished]
    if finished:
        raise ValueError(f"{', '.join(finished)} finished, so nothing of it was lost: leave it out of `--lost`.")


def rounded(value: Any) -> Any:
    """
    :param value: A number, a string or None, or a list or dictionary of such
    :return: the same with ``N_DIGITS`` significant digits
    """
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return float(f"{value:.{N_DIGITS}g}") if isinstance(value, float) else value


def shared_settings(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """
    :param rows: Results of ``row_of``; their ``settings`` are replaced by a key
    :return: the settings by key, without repetition: runs of one algorithm that differ in their seed only have the same
    """
    settings: dict[str, dict[str, Any]] = {}
    for row in rows:
        # A digest, not a number: after a kill between two files, no row may get the settings of another run. The letter keeps
        # programs from reading "1234e56" as a number
        # As in the file, where all keys are strings, which can be sorted
        in_file = json.loads(json.dumps(row["settings"]))
        digest = hashlib.sha256(json.dumps(in_file, sort_keys=True).encode()).hexdigest()
        key = f"s{digest[:7]}"
        settings[key], row["settings"] = row["settings"], key
    return settings


def row_of(record: Record, study: str) -> dict[str, Any]:
    """
    :param record: Record of a run
    :param study: Name of the study
    :return: its row in ``runs.csv``, with ``settings`` that have no column of their own
    """
    settings = dict(record.settings)
    row: dict[str, Any] = {"study": study, "run": record.path}
    row |= {column: settings.pop(name, None) for name, column in COLUMNS.items()}
    row |= {"state": record.state, "steps": record.status.get("steps", 0), "seconds": record.status.get("seconds", 0.0)}
    row |= dict.fromkeys(
        ("evaluations", "last_evaluation", "last_evaluation_error", "best_evaluation", "best_evaluation_steps")
    )
    row["evaluations"] = len(record.timesteps)
    if len(record.timesteps):
        row["last_evaluation"], row["last_evaluation_error"] = record.means[-1], standard_error(record.returns[-1])
        row["best_evaluation"], row["best_evaluation_steps"] = record.means[record.best], record.timesteps[record.best]
    row |= {name: record.metrics.get(name) for name in SUMMARY_METRICS}
    row["command"] = settings.pop("command", None) or command_of(record.settings)
    if settings.get("config"):
        # The folder is of no use elsewhere
        settings["config"] = Path(settings["config"]).name
    return {**row, "settings": settings}


def command_of(settings: dict[str, Any]) -> str:
    """
    :param settings: Settings of a run
    :return: the command that trains such a run; "" if it has other hyperparameters than its name says, as in a search
    """
    group, given = field_name(settings["group"]), settings.get("hyperparams") or {}
    of_group = TASKS.get(group, ("", {}))[1]
    # A group may be one of a file of the user's
    if {**given, **of_group} != given or group not in (*TASKS, settings.get("algo", group)):
        return ""
    words = ["python", "-m", "sb3_qac", "study", settings["env_id"], "--algos", settings["group"]]
    words += ["--seeds", str(settings["seed"])]
    for name, (option, default) in OPTIONS.items():
        value = settings.get(name, default)
        if value is not None and value != default:
            # A return that is a whole number has no ".0", as users write it
            words += [option, Path(value).name if name == "config" else str(value).removesuffix(".0")]
    params = [f"{name}:{value!r}" for name, value in given.items() if name not in of_group]
    words += ["-params", *params] if params else []
    words += ["--gym-packages", *settings["gym_packages"]] if settings.get("gym_packages") else []
    words += ["--deterministic"] if settings.get("deterministic") else []
    words += [] if settings.get("native", True) else ["--stock"]
    return shlex.join(words)


def evaluations_of(record: Record) -> pd.DataFrame:
    """
    :param record: Record of a run with evaluations
    :return: a row for each episode, in the order in which they were played
    """
    n_episodes = record.returns.shape[1]
    return pd.DataFrame(
        {
            "run": record.path,
            "steps": np.repeat(record.timesteps, n_episodes),
            "return": record.returns.ravel(),
            "length": None if record.lengths is None else record.lengths.ravel(),
        }
    )


def thinned(record: Record, n_points: int | None = N_POINTS) -> pd.DataFrame:
    """
    :param record: Record of a run with curves
    :param n_points: Number of rows; None for all
    :return: its curves, with at most ``n_points`` rows. If there are more, each point is the mean of about equally many
        consecutive rows, at the steps of the last one.
    """
    table = pd.DataFrame(record.curves).rename_axis("step").reset_index()
    if n_points is not None and len(table) > n_points:
        groups = np.arange(len(table)) * n_points // len(table)
        table = table.groupby(groups).agg({name: "last" if name == "step" else "mean" for name in table})
    table.insert(0, "run", record.path)
    return table


def check_environments(parts: dict[str, list[Record]], folder: Path) -> None:
    """
    :param parts: Records by part of a study
    :param folder: Folder of a packed study; it need not exist
    :raises ValueError: if runs of two environments have the same path, so that one would replace the other
    """
    added = {record.path: record.settings["env_id"] for record in records_of(parts)}
    for run in packed_runs(folder).itertuples():
        if added.get(run.run, run.environment) != run.environment:
            raise ValueError(
                f"{run.run} is a run on {added[run.run]}, but that of this name in {folder} is one on {run.environment}, "
                f"which it would replace. Give another --output, or move the runs into a folder of the study named "
                f"{env_dirname(added[run.run])}."
            )


def check_all_are_there(parts: dict[str, list[Record]], folder: Path) -> None:
    """
    :param parts: Records by part of a study
    :param folder: Folder of a packed study, which they will replace; it need not exist
    :raises ValueError: if a packed run is not among them, has not come as far, or lacks its evaluations, curves or diagnosis,
        because it may be kept nowhere else
    """
    ours = {record.path: record for record in records_of(parts)}
    diagnosed, drawn = set[str](), set[str]()
    # A study can be packed again where these are missing or damaged
    with contextlib.suppress(OSError, EOFError, lzma.LZMAError, ValueError):
        diagnosed = set(read_json(folder / DIAGNOSIS_FILE))
        drawn = set(by_run(folder / CURVES_FILE))
    gone = []
    for run in packed_runs(folder).itertuples():
        record = ours.get(run.run)
        if record is None or not _as_far(record, run.state, run.steps, run.evaluations):
            gone.append(run.run)
        elif (run.run in diagnosed and not record.diagnosis) or (run.run in drawn and not record.curves):
            gone.append(run.run)
    if gone:
        raise ValueError(
            f"{len(gone)} of the packed runs in {folder} would be lost, because the study does not have them, or has less of "
            f"them: {', '.join(sorted(gone)[:3])}{', ...' if len(gone) > 3 else ''}. Give `--add` to keep them, or delete "
            f"{folder / RUNS_FILE} first."
        )


def add_packed(parts: dict[str, list[Record]], folder: Path) -> dict[str, list[Record]]:
    """
    :param parts: Records by part of a study
    :param folder: Folder of a packed study; it need not exist
    :return: these records, and those of the packed study for runs that are not among them, or that came further there, as on
        a machine before another has begun them again. A diagnosis, and the curves of a run that came no further, are kept.
    """
    packed = packed_runs(folder)["part"].unique()
    if not len(packed):
        return parts
    merged = {}
    for part in sorted({*parts, *packed}):
        by_path = {record.path: record for record in load_pack(folder, part)}
        for record in parts.get(part, []):
            other = by_path.get(record.path)
            if other is None:
                by_path[record.path] = record
            elif _as_far(record, other.state, other.status["steps"], len(other.timesteps)):
                by_path[record.path] = _with_parts_of(record, other)
        merged[part] = [by_path[path] for path in sorted(by_path)]
    return merged


def _as_far(record: Record, state: str, steps: float, n_evaluations: float) -> bool:
    """
    :param record: Record of a run
    :param state: State of the packed run of this name
    :param steps: Its steps
    :param n_evaluations: Number of its evaluations
    :return: whether the record may replace it: it has as many steps and evaluations, and is finished if that one is. A
        finished run may be one of fewer steps, as of a study with another ``--steps``.
    """
    as_long = record.status.get("steps", 0) >= float(steps) and len(record.timesteps) >= float(n_evaluations)
    return as_long and (record.finished or state not in ENDED)


def _with_parts_of(record: Record, packed: Record) -> Record:
    """
    :param record: Record that replaces that of a packed run
    :param packed: The packed run
    :return: the record, with the parts that it lacks, unless it is of another training than the packed run
    """
    n = len(packed.timesteps)
    begins = (record.timesteps[:n], record.returns[:n]), (packed.timesteps, packed.returns)
    # One that was packed before its first evaluation has no episodes to compare
    if n and not all(map(np.array_equal, *begins)):
        return record
    record = record if record.diagnosis else replace(record, diagnosis=packed.diagnosis)
    if not record.curves and record.status.get("steps") == packed.status["steps"]:
        record = replace(record, curves=packed.curves, metrics={**packed.metrics, **record.metrics})
    return record


def keep_lost(parts: dict[str, list[Record]], folder: Path) -> None:
    """
    A run that was packed as lost stays lost until it has come further.

    :param parts: Records by part of a study; their ``status`` is changed
    :param folder: Folder of a packed study; it need not exist
    """
    packed = packed_runs(folder)
    lost = {run.run: float(run.steps) for run in packed[packed["state"] == "lost"].itertuples()}
    for record in records_of(parts):
        if not record.finished and record.status.get("steps", 0) <= lost.get(record.path, -1):
            record.status["lost"] = True


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: Command line; by default, that of the process
    :return: Exit code
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pack",
        description="Writes runs.csv (a row for each run), settings.json, evaluations.csv.xz (a row for each episode), "
        "curves.csv.xz (thinned), and diagnosis.json (if there are diagnoses). `report` reads them like the folders of the "
        "runs. Studies in subfolders of the study are packed as parts: `report results/pong/PART --output FOLDER` reads one.",
    )
    parser.add_argument("folder", type=Path, metavar="STUDY", help="folder of the study, or a packed one to merge with --add")
    parser.add_argument("--output", type=Path, help="folder for the files; default: results/NAME_OF_THE_STUDY")
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the packed runs of OUTPUT that STUDY does not have, or has with fewer steps, as of another machine",
    )
    parser.add_argument(
        "--lost", nargs="+", default=[], metavar="RUN", help="runs that were lost with their machine, such as a2c_seed-0"
    )
    parser.add_argument("--points", type=int, default=N_POINTS, help="points of a run's curves at most (default: 100)")
    args = parser.parse_args(arguments)
    try:
        check_integer("points", args.points, minimum=1)
        for path in pack(args.folder, args.output or Path("results", args.folder.resolve().name), args):
            print(path)
    except ValueError as error:
        sys.exit(f"pack: {error}")
    return 0


def pack(folder: Path, output: Path, args: argparse.Namespace) -> list[Path]:
    """
    :param folder: Folder of a study
    :param output: Folder for the files
    :param args: Command line, with ``add``, ``lost`` and ``points``
    :return: the files
    :raises ValueError: if something of the runs that are packed already would be lost
    """
    parts = load_everything(folder)
    check_environments(parts, output)
    keep_lost(parts, output)
    kept = []
    if args.add:
        ours = {record.path: record for record in records_of(parts)}
        parts = add_packed(parts, output)
        for packed in records_of(parts):
            record = ours.get(packed.path)
            if record is not None and record.status is packed.status:
                if packed.curves and not record.curves:
                    # They come from the pack, which may have more rows of them than `--points`
                    kept.append(packed.path)
                continue
            kept.append(packed.path)
            if record is not None:
                instead = f"its {packed.state} run in {output}, at {packed.status['steps']:,} steps, is kept"
                steps = f"{record.status.get('steps', 0):,} steps"
                print(f"pack: {record.path} is {record.state} in {folder}, at {steps}: {instead}.", file=sys.stderr)
    else:
        check_all_are_there(parts, output)
    return write_pack(parts, output, args.lost, args.points, kept)


if __name__ == "__main__":
    sys.exit(main())
