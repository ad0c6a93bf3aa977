"""Records of a study, from the folders of its runs or from its packed form."""

import contextlib
import io
import math
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_qac.common.files import read_json, write_atomically
from sb3_qac.study.catalogue import field_name
from sb3_qac.study.pack import (
    RUNS_FILE,
    SETTINGS_FILE,
    check_different_runs,
    find_pack,
    load_pack,
)
from sb3_qac.study.records import CURVES, Groups, Record
from sb3_qac.study.run import env_dirname

# SB3's PPO has another name for one row of the log
SYNONYMS = {"train/policy_gradient_loss": "train/policy_loss"}
# Entries of hyperparameters that change what an environment is
ENVIRONMENT_ENTRIES = ("env_kwargs", "env_wrapper", "vec_env_wrapper", "monitor_kwargs", "frame_stack", "normalize")
CURVES_FILE, DIAGNOSIS_FILE, NOISE_FILE = "curves.csv", "diagnosis.json", "noise.json"


class ConfigLoader(yaml.SafeLoader):
    """Reads the ``config.yml`` of RL Zoo, which is an ``OrderedDict``, without making the other objects of Python in it."""


def _described(loader: yaml.SafeLoader, kind: str, node: yaml.Node) -> Any:
    """:return: a plain value that is the same for the same object: of a class or function its name"""
    if isinstance(node, yaml.SequenceNode):
        parts: Any = loader.construct_sequence(node, deep=True)
    elif isinstance(node, yaml.MappingNode):
        parts = loader.construct_mapping(node, deep=True)
    else:
        parts = loader.construct_scalar(node)  # type: ignore[arg-type]
    name = kind.partition(":")[2]
    if not name:
        return parts
    return {name: parts} if parts else name


ConfigLoader.add_multi_constructor("tag:yaml.org,2002:python/", _described)
ConfigLoader.add_constructor(
    "tag:yaml.org,2002:python/object/apply:collections.OrderedDict",
    lambda loader, node: dict(loader.construct_sequence(node, deep=True)[0]),  # type: ignore[arg-type]
)


def parse_config(text: str) -> dict[str, Any]:
    """
    :param text: Hyperparameters in YAML, as RL Zoo writes them
    :return: the hyperparameters as plain values, which can be compared
    :raises ValueError: if there are none
    """
    try:
        config = yaml.load(text, ConfigLoader)
    except (yaml.YAMLError, TypeError, IndexError) as error:
        raise ValueError(f"cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError("has no hyperparameters")
    return config


def read_config(path: Path) -> dict[str, Any]:
    """
    :param path: A ``config.yml`` of RL Zoo
    :return: its hyperparameters as plain values, which can be compared
    :raises ValueError: if it is damaged
    """
    try:
        return parse_config(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it {error}.") from None


def changed_entries(now: dict[str, Any], before: dict[str, Any], names: Iterable[str]) -> list[str]:
    """
    :param now: Hyperparameters as plain values
    :param before: Those of a run
    :param names: Entries to compare
    :return: a description of each entry that differs
    """
    return [
        f"`{name}` is {now.get(name)!r}, and was {before.get(name)!r}" for name in names if now.get(name) != before.get(name)
    ]


def load_study(folder: Path) -> dict[str, Groups]:
    """
    :param folder: Folder of a study, either packed or with the folders of its runs. A part of a packed study keeps the path of
        its original folder, such as "results/ladder/lin_7e-4".
    :return: records of all runs that were started, by environment and group, in the order of their seeds
    :raises ValueError: if there are none, a run is there twice, or some runs are packed and others are not
    """
    check_no_run(folder)
    runs, pack = runs_of(folder), find_pack(folder)
    check_one_form(folder, runs.values())
    records = [replace(load_run(path), path=key) for key, path in runs.items()]
    if not records and pack is not None:
        records = load_pack(*pack)
    if not records:
        inside = sorted({str(path.parent.parent) for path in folder.glob("*/*/run.json") if is_run(path)})
        raise ValueError(
            f"There is no run of a study in {folder}. "
            + (f"There are studies inside it: {', '.join(inside)}. " if inside else "")
            + f"`python -m sb3_qac study ... --output {folder}` creates one. RL Zoo draws its own runs: "
            "`python -m rl_zoo3.cli plot_train -a ALGO -e ENV -f LOGS` their returns in training, "
            "`python -m rl_zoo3.cli all_plots -a ALGO -e ENV -f LOGS` their evaluations."
        )
    check_different_runs(records)
    return by_environment(records)


def check_one_form(folder: Path, runs: Iterable[Path]) -> None:
    names = [run.name for run in runs]
    # Other programs may have tables of the name that the packed runs have
    if names and all((folder / name).is_file() for name in (RUNS_FILE, SETTINGS_FILE)):
        raise ValueError(
            f"{folder} has a packed study ({RUNS_FILE}) and also folders of runs ({', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}), so a run could count twice. Move the folders, or the packed files, into a "
            "folder of their own."
        )


def check_no_run(folder: Path) -> None:
    if (folder / "run.json").is_file():
        raise ValueError(
            f"{folder} is a run of a study, not a study. Name the folder that contains it, {folder.resolve().parent}."
        )


def by_environment(records: Sequence[Record]) -> dict[str, Groups]:
    """
    :param records: Records of a study
    :return: the records by environment and group, in the order of their seeds
    """
    envs: dict[str, Groups] = {}
    for record in sorted(records, key=lambda record: (record.settings["group"], record.settings["seed"])):
        envs.setdefault(record.settings["env_id"], {}).setdefault(record.settings["group"], []).append(record)
    return dict(sorted(envs.items()))


def runs_of(folder: Path) -> dict[str, Path]:
    """
    :param folder: Folder of a study
    :return: folders of its runs, by their path within the study. Each is in the study's folder or in the folder of an
        environment.
    """
    runs = {}
    for path in sorted([*folder.glob("*/run.json"), *folder.glob("*/*/run.json")]):
        run = path.parent
        if is_run(path) and part_of(folder, run, read_json(path)["env_id"]) == "":
            runs[run.relative_to(folder).as_posix()] = run
    return runs


def is_run(path: Path) -> bool:
    """:return: whether a ``run.json`` is that of a run. Checkpoints, and other programs, have files of that name too."""
    if path.parent.name == "checkpoints":
        return False
    settings: Any = read_json(path)
    return isinstance(settings, dict) and all(isinstance(settings.get(name), str) for name in ("name", "group", "env_id"))


def part_of(folder: Path, run: Path, env_id: str) -> str:
    """
    :param folder: Folder of a study
    :param run: Folder of a run in it
    :param env_id: Environment of the run
    :return: path of the study that the run belongs to, relative to the folder; "" for the study itself
    """
    parent = run.parent
    if parent != folder and parent.name == env_dirname(env_id):
        parent = parent.parent
    return "" if parent == folder else parent.relative_to(folder).as_posix()


def load_run(folder: Path) -> Record:
    """
    :param folder: Folder of a run
    :return: its record
    :raises ValueError: if one of its files is damaged
    """
    status = read_json(folder / "status.json")
    timesteps, returns, lengths = load_evaluations(folder / "evaluations.npz", finished=status.get("finished", False))
    settings = read_json(folder / "run.json")
    settings |= {name: field_name(settings[name]) for name in ("name", "group")}
    config = folder / env_dirname(settings["env_id"]) / "config.yml"
    # One that a killed process left half written counts as none
    with contextlib.suppress(FileNotFoundError, ValueError):
        settings["resolved_hyperparams"] = read_config(config)
    diagnosis: Any = read_json(folder / DIAGNOSIS_FILE)
    curves = load_curves(folder)
    metrics = {**summary_metrics(curves), **read_json(folder / NOISE_FILE)}
    training_return = status.get("training_return")
    if training_return is not None and math.isfinite(training_return):
        # The last row of the log is older where not every update is logged
        metrics["training_return"] = training_return
    return Record(
        path=folder.name,
        folder=folder,
        settings=settings,
        status={**status, "failed": (folder / "error.txt").is_file()},
        timesteps=timesteps,
        returns=returns,
        lengths=lengths,
        curves=curves,
        diagnosis=diagnosis or [],
        metrics=metrics,
    )


def load_evaluations(path: Path, finished: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """
    :param path: The ``evaluations.npz`` of a run
    :param finished: Whether the run is finished. If not, a file that a killed process left half written counts as none.
    :return: steps of the evaluations, shape (n_evaluations,); returns and lengths of their episodes, shape (n_evaluations,
        n_episodes) each, lengths if there are any
    :raises ValueError: if the run is finished and the file is damaged
    """
    try:
        with open(path, "rb") as file:
            evaluations = np.load(file)
            return evaluations["timesteps"], evaluations["results"], evaluations.get("ep_lengths")
    except FileNotFoundError:
        pass
    except (zipfile.BadZipFile, EOFError, KeyError, ValueError) as error:
        if finished:
            raise ValueError(
                f"{path} is damaged ({error}), although its run is finished. Take another copy of it, or move the folder of "
                "the run away."
            ) from None
    return np.zeros(0, dtype=int), np.zeros((0, 1)), None


def summary_metrics(curves: dict[str, pd.Series]) -> dict[str, float]:
    """
    :param curves: Rows of a log
    :return: ``training_return``, the mean of the last 100 episodes of training, and ``entropy``, the mean over the last tenth
        of the run, in nats
    """
    metrics: dict[str, Any] = {}
    if "rollout/ep_rew_mean" in curves:
        metrics["training_return"] = float(curves["rollout/ep_rew_mean"].iloc[-1])
    if "train/entropy_loss" in curves:
        loss = curves["train/entropy_loss"]
        metrics["entropy"] = -float(loss.iloc[-max(len(loss) // 10, 1) :].mean())
    return metrics


def load_curves(folder: Path) -> dict[str, pd.Series]:
    """
    Read the TensorBoard files of a run, and keep the rows that a report draws as ``curves.csv``, if it can be written. If
    there are no TensorBoard files, read ``curves.csv``.

    :param folder: Folder of a run
    :return: rows of its log, indexed by steps
    """
    kept = folder / CURVES_FILE
    curves = {}
    # Algorithms that cannot be resumed began again in a new folder, and the last attempt counts: DQN_10, not DQN_9
    attempts = {path.parent for path in folder.glob("tensorboard/**/events.out.tfevents.*")}
    for events in sorted(attempts, key=lambda path: (len(path.name), path.name), reverse=True):
        accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
        accumulator.Reload()
        tags = {SYNONYMS.get(tag, tag): tag for tag in accumulator.Tags()["scalars"]}
        for name in (name for name in CURVES if name in tags):
            scalars = accumulator.Scalars(tags[name])
            curve = pd.Series([scalar.value for scalar in scalars], index=[scalar.step for scalar in scalars])
            curves[name] = curve[~curve.index.duplicated(keep="last")].sort_index()
        if curves:
            break
    if curves:
        text = pd.DataFrame(curves).rename_axis("step").to_csv(float_format="%.6g")
        # The folder may be another user's, or on a disk that can only be read
        with contextlib.suppress(OSError):
            write_atomically(kept, text.encode())
    elif kept.is_file():
        text = kept.read_text()
    else:
        return {}
    try:
        table = pd.read_csv(io.StringIO(text), index_col="step")
    except ValueError as error:
        raise ValueError(f"{kept} is damaged: {error}.") from None
    return {tag: table[tag].dropna() for tag in table if table[tag].notna().any()}
