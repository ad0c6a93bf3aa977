"""One run of a study: its settings, and the file that keeps them."""

import dataclasses
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sb3_qac.common.files import read_json

# Settings that may change when a run is resumed: where and how it is computed, but not its outcome, and how it is resumed
MAY_CHANGE = ("folder", "n_threads", "device", "wandb", "gym_packages", "new_episodes")


@dataclass(frozen=True)
class Run:
    """
    Settings of one run of a study.

    :param name: Its name, such as "all-action-baseline_seed-100"
    :param group: Algorithm and variant, such as "all-action-baseline", or "task2", its name in the course documents
    :param algo: Algorithm, by its name in RL Zoo
    :param env_id: Environment
    :param seed: Seed
    :param folder: Folder for everything that it writes
    :param hyperparams: Entries that replace those of the preset
    :param config: YAML file with hyperparameters; None for the algorithm's own
    :param n_timesteps: Environment steps; 0 for as many as the preset has
    :param eval_freq: Environment steps between two evaluations
    :param eval_from: No evaluation until the last ``n_eval_episodes`` training episodes have this mean return, or the end of
        the run; None to evaluate from the start
    :param n_eval_episodes: Whole episodes of an evaluation, each in an environment of its own
    :param deterministic: Whether the most probable action is evaluated, instead of sampled ones
    :param stop_return: Mean return of an evaluation at which the run stops; None for none
    :param native: Whether Atari games are emulated in C++ (see ``AleVecEnv``)
    :param dtype: Precision of ``LeanNatureCNN`` for images; None for SB3's ``NatureCNN``
    :param n_threads: Threads for PyTorch
    :param device: PyTorch device
    :param wandb: Mode of Weights & Biases: "offline", "online" or "disabled"
    :param gym_packages: Modules that register environments when they are imported
    :param new_episodes: Whether a resume begins new episodes, which is not exact (see ``ExactCheckpointCallback``)
    """

    name: str
    group: str
    algo: str
    env_id: str
    seed: int
    folder: str
    hyperparams: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    n_timesteps: int = 0
    eval_freq: int = 300_000
    eval_from: float | None = None
    n_eval_episodes: int = 30
    deterministic: bool = False
    stop_return: float | None = None
    native: bool = True
    dtype: str | None = "float32"
    n_threads: int = 1
    device: str = "auto"
    wandb: str = "offline"
    gym_packages: list[str] = field(default_factory=list)
    new_episodes: bool = False

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return bool(read_json(Path(self.folder, "status.json")).get("finished"))

    @property
    def failed_at_once(self) -> bool:
        """Whether it failed before its first step, perhaps because of its settings."""
        folder = Path(self.folder)
        # The status may be some seconds old if its process was killed
        begun = read_json(folder / "status.json").get("steps", 0) > 0 or any(
            not path.name.startswith(f"step-{0:012d}.") for path in folder.glob("checkpoints/step-*")
        )
        return (folder / "error.txt").is_file() and not begun

    @property
    def reached(self) -> bool:
        """Whether its last evaluation reached ``stop_return``."""
        last = read_json(Path(self.folder, "status.json")).get("last_evaluation")
        return last is not None and self.stop_return is not None and last["mean_return"] >= self.stop_return


def env_dirname(env_id: str) -> str:
    """
    :param env_id: Environment
    :return: its name in paths, as in RL Zoo's: "ALE-Pong-v5" for "ALE/Pong-v5", and "Mine-v0" for "my_module:Mine-v0"
    """
    return env_id.rpartition(":")[2].replace("/", "-")


def check_same_run(run: Run) -> None:
    """
    :param run: A run
    :raises ValueError: if its folder contains a run with other settings, unless that run failed before its first step
    """
    kept = {} if run.failed_at_once else read_json(Path(run.folder, "run.json"))
    if kept:
        # A setting that its file does not have is newer than the run, and was at its default
        kept = {**{x.name: x.default for x in dataclasses.fields(Run) if x.default is not dataclasses.MISSING}, **kept}
    # In the form that they have in the file
    settings = json.loads(json.dumps(asdict(run)))
    different = [
        f"`{name}` is {value!r}, and was {kept[name]!r}"
        for name, value in settings.items()
        if name in kept and name not in MAY_CHANGE and not _same(name, value, kept[name])
    ]
    if different:
        raise ValueError(
            f"There is a run with other settings in {run.folder}: {'; '.join(different)}. "
            "Give the same settings to resume it, or another `--output`."
        )


def _same(name: str, value: Any, kept: Any) -> bool:
    if name == "config" and None not in (value, kept):
        # A study and its YAML file can be moved
        return Path(value).name == Path(kept).name
    return value == kept


def read_run(folder: Path) -> Run:
    """
    :param folder: Folder of a run
    :return: its settings
    :raises ValueError: if there is no run, or its file with hyperparameters is missing
    """
    settings: Any = read_json(folder / "run.json")
    # Other programs have files of this name too
    if not isinstance(settings, dict) or not {"name", "group", "algo", "env_id", "seed"} <= settings.keys():
        study = folder if folder.is_dir() else folder.parent
        runs = ", ".join(sorted(path.parent.name for path in study.glob("*/run.json")))
        raise ValueError(f"There is no run of a study in {folder}." + (f" The runs in {study} are {runs}." if runs else ""))
    known = {field.name: settings[field.name] for field in dataclasses.fields(Run) if field.name in settings}
    if known.get("config") and not Path(known["config"]).is_file():
        raise ValueError(
            f"The hyperparameters of {folder} were those of {known['config']}, which no longer exists. Put that file back, or "
            f"write its new place into the entry `config` of {folder / 'run.json'}."
        )
    return Run(**{**known, "folder": str(folder)})
