"""The names that a study accepts. Studies are YAML files, ``hyperparams/studies/NAME.yml``; ``cartpole.yml`` explains them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sb3_qac.common.checks import check_choice, check_integer, check_number, check_seed
from sb3_qac.common.files import presets

# The course documents' names of three algorithms. A run has the name that it was asked for by; tables, plots and reports show
# the field's names
FIELD_NAMES = {"task1": "all-action", "task2": "all-action-baseline", "beta1": "beta-loo"}


@dataclass(frozen=True)
class Study:
    """
    Defaults of a study.

    :param env_ids: Environments
    :param algos: Names of its algorithms
    :param tasks: Of the names that are no algorithm's: the algorithm, and entries that replace those of its preset
    :param seeds: Seeds of each
    :param steps: Environment steps of each; 0 for as many as the preset has
    :param stop_return: Mean return of an evaluation at which a run stops
    :param eval_freq: Environment steps between two evaluations
    :param eval_from: Mean return of the training episodes below which there is no evaluation
    :param eval_episodes: Whole episodes of an evaluation
    :param deterministic: Whether evaluations take the most probable actions
    :param wandb: Mode of Weights & Biases
    :param cost: What a run of it took on one core, and what it keeps on the disk
    """

    env_ids: tuple[str, ...]
    algos: tuple[str, ...] = ("a2c", "all-action", "all-action-baseline")
    tasks: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 100)
    steps: int = 0
    stop_return: float | None = None
    eval_freq: int = 300_000
    eval_from: float | None = None
    eval_episodes: int = 30
    deterministic: bool = False
    wandb: str = "offline"
    cost: str = ""


SETTINGS = ("seeds", "steps", "stop_return", "eval_freq", "eval_from", "eval_episodes", "deterministic", "wandb", "cost")


def read_study(path: Path) -> Study:
    """
    :param path: YAML file of a study
    :return: the study
    :raises ValueError: if something in it cannot be used
    """
    try:
        content = yaml.safe_load(path.read_text())
        _check_names("the file", content, ("environments", "groups", *SETTINGS))
        for name, value in content.items():
            _check_setting(name, value)
        groups = content.get("groups")
        env_ids = content.get("environments")
        if not isinstance(env_ids, list) or not env_ids or not isinstance(groups, dict) or not groups:
            raise ValueError("`environments` must be a list and `groups` a mapping of names. Add what is missing.")
        for env_id in env_ids:
            if not isinstance(env_id, str):
                raise ValueError(f"`environments` must be names, but {env_id!r} was given.")
        tasks = {}
        for name, group in groups.items():
            # It is a part of the name of a folder
            if not isinstance(name, str) or not name or set(name) & set("/\\"):
                raise ValueError(f"The name of a group must be a text without slashes, but {name!r} was given.")
            if group is not None:
                _check_names(name, group, ("algo", "hyperparams"))
                tasks[name] = (group.get("algo"), group.get("hyperparams") or {})
                if not isinstance(tasks[name][0], str) or not isinstance(tasks[name][1], dict):
                    raise ValueError(f"{name} must have `algo`, a name, and may have `hyperparams`, a mapping: {group!r}.")
                # A run's settings are kept as JSON, which has no dates
                json.dumps(group)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no study that can be run: {error}") from None
    settings: dict[str, Any] = {
        name: tuple(value) if name == "seeds" else value for name, value in content.items() if name in SETTINGS
    }
    return Study(tuple(content["environments"]), tuple(groups), tasks, **settings)


def _check_names(where: str, content: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a mapping of {', '.join(allowed)}, but {content!r} was given.")
    for name in content:
        if name not in allowed:
            raise ValueError(f"{where} has {name!r}, but may have {', '.join(allowed)}. Correct or remove it.")


def _check_setting(name: str, value: Any) -> None:
    if name == "seeds":
        if not isinstance(value, list) or not value:
            raise ValueError(f"`seeds` must be a list of seeds, such as [0, 1], but {value!r} was given.")
        for seed in value:
            check_seed("seeds", seed)
    elif name in ("steps", "eval_freq", "eval_episodes"):
        check_integer(name, value, minimum=1)
    elif name in ("stop_return", "eval_from"):
        check_number(name, value, minimum=-float("inf"))
    elif name in ("deterministic", "wandb"):
        check_choice(name, value, (True, False) if name == "deterministic" else ("offline", "online", "disabled"))


STUDIES = {path.stem: read_study(path) for path in sorted(presets("studies/pong").parent.glob("*.yml"))}
# Names that are no algorithm's, usable in every study
TASKS: dict[str, tuple[str, dict[str, Any]]] = {name: x for study in STUDIES.values() for name, x in study.tasks.items()}


def study_of(name: str) -> Study:
    """
    :param name: Short name of a study, the path of a YAML file of one, or an environment
    :return: the study
    :raises ValueError: if something in the file cannot be used
    """
    if name in STUDIES:
        return STUDIES[name]
    if not is_study_file(name):
        return Study((name,))
    study = read_study(Path(name))
    for group, task in study.tasks.items():
        if TASKS.get(field_name(group), task) != task:
            raise ValueError(f"{name} has settings of its own for {group}, a name that has others here. Choose another one.")
    return study


def is_study_file(name: str) -> bool:
    """
    :param name: Short name of a study, the path of a YAML file of one, or an environment
    :return: whether it is the path of a file
    """
    return name.endswith((".yml", ".yaml"))


def field_name(name: str) -> str:
    """
    :param name: Name of an algorithm, or of a run such as "task1_seed-0"
    :return: the same name, with the field's name of the algorithm
    """
    group, seed, number = name.partition("_seed-")
    return f"{FIELD_NAMES.get(group, group)}{seed}{number}"
