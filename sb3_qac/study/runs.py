"""One training of a study, from its settings to its folder. RL Zoo's ``ExperimentManager`` does the most of it."""

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import stable_baselines3
import torch as th
import yaml
from filelock import FileLock
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.utils import ALGOS, get_wrapper_class
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticCnnPolicy
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv

import sb3_qac
from sb3_qac.common.curves import CurvesCallback
from sb3_qac.common.env_util import to_ale_vec_env
from sb3_qac.common.files import read_json, write_atomically
from sb3_qac.common.policies import PixelActorCriticCnnPolicy
from sb3_qac.common.torch_layers import LeanNatureCNN, constant_weights
from sb3_qac.common.wrappers import EpisodeReplay
from sb3_qac.resume import ExactCheckpointCallback
from sb3_qac.resume.state import StateError, get_state
from sb3_qac.resume.wandb import wandb_run_id
from sb3_qac.zoo import ALGORITHMS, presets, register

# Of a run that is gone on with: where and with what it is computed may change, what comes of it does not
MAY_CHANGE = ("folder", "n_threads", "device", "wandb")
# Evaluation games are not those of training
EVAL_SEED_OFFSET = 10_000


@dataclass(frozen=True)
class Run:
    """
    What one training of a study is.

    :param name: Its name, such as "task2_seed-100"
    :param group: What it is a replicate of, such as "task2"
    :param algo: Algorithm, by its name in RL Zoo
    :param env_id: Environment
    :param seed: Seed
    :param folder: Folder for all that it writes
    :param hyperparams: Entries that replace those of the preset
    :param config: YAML file with hyperparameters; None for the algorithm's own
    :param n_timesteps: Environment steps; 0 for as many as the preset has
    :param eval_freq: Environment steps between two evaluations
    :param n_eval_episodes: Whole episodes of an evaluation, each in an environment of its own
    :param deterministic: Whether the most probable action is evaluated, instead of sampled ones
    :param stop_return: Mean return of an evaluation at which the training stops; None for none
    :param native: Whether Atari games are emulated in C++ (see ``AleVecEnv``)
    :param dtype: Precision of ``LeanNatureCNN`` for images; None for SB3's ``NatureCNN``
    :param n_threads: Threads for PyTorch
    :param device: PyTorch device
    :param wandb: Mode of Weights & Biases: "offline", "online" or "disabled"
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
    n_eval_episodes: int = 30
    deterministic: bool = False
    stop_return: float | None = None
    native: bool = True
    dtype: str | None = "float32"
    n_threads: int = 1
    device: str = "auto"
    wandb: str = "offline"

    @property
    def finished(self) -> bool:
        """Whether it has come to its end."""
        return bool(read_json(Path(self.folder, "status.json")).get("finished"))


def check_same_run(run: Run) -> None:
    """
    :param run: A run
    :raises ValueError: if there is one with other settings in its folder, unless it failed, maybe because of them
    """
    kept = {} if Path(run.folder, "error.txt").is_file() else read_json(Path(run.folder, "run.json"))
    # As they are in the file
    settings = json.loads(json.dumps(asdict(run)))
    different = [
        f"`{name}` is {value!r}, and was {kept[name]!r}"
        for name, value in settings.items()
        if name in kept and name not in MAY_CHANGE and _told(name, value) != _told(name, kept[name])
    ]
    if different:
        raise ValueError(
            f"There is a run with other settings in {run.folder}: {'; '.join(different)}. "
            "Give the same ones to go on with it, or another folder with `--output`."
        )


def _told(name: str, value: Any) -> Any:
    # A study and its YAML file can be moved
    return Path(value).name if name == "config" and value is not None else value


class StopOnReturn(BaseCallback):
    """
    Stops a training whose last evaluation reached a return. For ``EvalCallback``'s ``callback_after_eval``.

    :param stop_return: Mean return
    """

    parent: EvalCallback

    def __init__(self, stop_return: float) -> None:
        super().__init__()
        self.stop_return = stop_return

    def _on_step(self) -> bool:
        return self.parent.last_mean_reward < self.stop_return


class StatusCallback(BaseCallback):
    """
    Keeps a file up to date that says how far a training is.

    :param path: JSON file
    :param evaluation: Evaluation whose last result to tell
    """

    def __init__(self, path: Path, evaluation: EvalCallback) -> None:
        super().__init__()
        self.path, self.evaluation = path, evaluation

    def _on_training_start(self) -> None:
        # Here, since a checkpoint that was gone on from has brought back the attributes of callbacks as they were
        self.first_step = self.model.num_timesteps
        self.before = read_json(self.path).get("seconds", 0.0) if self.first_step else 0.0
        self.start = self.written = time.monotonic()
        self.write(finished=False)

    def _on_step(self) -> bool:
        if time.monotonic() - self.written > 2:
            self.write(finished=False)
        return True

    def _on_training_end(self) -> None:
        # Where learn came to its end, not where it was interrupted
        if sys.exc_info()[0] is None:
            self.write(finished=read_json(self.path.parent / "checkpoints" / "run.json").get("finished", True))

    def write(self, finished: bool) -> None:
        """:param finished: Whether the training has come to its end"""
        self.written = time.monotonic()
        seconds = self.written - self.start
        status = {
            "steps": self.model.num_timesteps,
            "total": self.model._total_timesteps,
            "seconds": self.before + seconds,
            "steps_per_second": (self.model.num_timesteps - self.first_step) / max(seconds, 1e-9),
            "last_evaluation": self.last_evaluation(),
            "finished": finished,
        }
        write_atomically(self.path, json.dumps(status).encode())

    def last_evaluation(self) -> dict[str, Any] | None:
        """:return: steps and mean return of the last evaluation, if there was one"""
        if not self.evaluation.evaluations_timesteps:
            return None
        results = self.evaluation.evaluations_results[-1]
        return {"steps": self.evaluation.evaluations_timesteps[-1], "mean_return": float(np.mean(results))}


class SnapshotCallback(BaseCallback):
    """
    Keeps the model as it is at the start and at every tenth of the training, without what only training needs, and by how
    much its environments are normalised, if they are.

    :param folder: Folder for SB3's files, such as "0003000000.zip", and "0003000000.pkl" of ``VecNormalize``
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def _on_training_start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        if self.model.num_timesteps == 0:
            self.save()

    def _on_step(self) -> bool:
        every = max(self.model._total_timesteps // 10, 1)
        steps = self.model.num_timesteps
        if steps // every > (steps - self.training_env.num_envs) // every:
            self.save()
        return True

    def save(self) -> None:
        """Write the model as it is."""
        path = self.folder / f"{self.model.num_timesteps:010}.zip"
        save_for_playing(self.model, path)
        normalization = self.model.get_vec_normalize_env()
        if normalization is not None:
            normalization.save(str(path.with_suffix(".pkl")))


def save_for_playing(model: BaseAlgorithm, path: Path) -> None:
    """
    Save a model for SB3's ``load`` without the state of its optimizer and without its last observations, at half the size.

    :param model: Model with a single optimizer, that of its policy
    :param path: File to write
    """
    optimizer = model.policy.optimizer
    state, optimizer.state = optimizer.state, type(optimizer.state)(dict)
    try:
        model.save(path, exclude=["_last_obs", "_last_original_obs", "ep_info_buffer", "ep_success_buffer"])
    finally:
        optimizer.state = state


class ConstantWeightsCallback(BaseCallback):
    """Lets the features extractor prepare its weights once a rollout, as QA2C does, for on-policy algorithms of SB3."""

    def __init__(self) -> None:
        super().__init__()
        self._rollout = contextlib.ExitStack()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self._rollout.close()
        self._rollout.enter_context(constant_weights(self.model.policy))

    def _on_rollout_end(self) -> None:
        self._rollout.close()

    def _on_training_end(self) -> None:
        self._rollout.close()


class StudyManager(ExperimentManager):
    """
    RL Zoo's manager for one run of a study: its folder, its evaluation, exact checkpoints.

    :param run: The run
    """

    def __init__(self, run: Run) -> None:
        super().__init__(
            Namespace(**asdict(run)),
            run.algo,
            run.env_id,
            log_folder=run.folder,
            tensorboard_log=f"{run.folder}/tensorboard",
            n_timesteps=run.n_timesteps,
            eval_freq=run.eval_freq,
            n_eval_episodes=run.n_eval_episodes,
            n_eval_envs=run.n_eval_episodes,
            hyperparams=dict(run.hyperparams),
            seed=run.seed,
            verbose=0,
            device=run.device,
            config=run.config or config_of(run.algo, run.env_id),
            log_interval=-1,
        )
        self.run = run
        self.save_path = run.folder
        self.params_path = f"{run.folder}/{self.env_name}"
        self.deterministic_eval = run.deterministic
        self.envs: list[VecEnv] = []
        self.eval_env_wrapper: Callable[[gym.Env], gym.Env] | None = None
        self.is_resumable = self.needs_replay = False

    def _preprocess_hyperparams(self, hyperparams: dict[str, Any]) -> Any:
        self.is_resumable = is_resumable(ALGOS[self.run.algo], hyperparams)
        self.needs_replay = self.is_resumable and not self._is_atari and not has_visible_state(self.run.env_id)
        self.eval_env_wrapper = get_wrapper_class({"env_wrapper": whole_games(hyperparams.get("env_wrapper"))})
        result = super()._preprocess_hyperparams(hyperparams)
        hyperparams, env_wrapper, callbacks, vec_env_wrapper = result
        if self._is_atari and self.run.native:
            vec_env_wrapper = to_ale_vec_env
        if self._is_atari and self.run.dtype is not None:
            use_lean_cnn(ALGOS[self.run.algo], hyperparams, self.run.dtype)
        return hyperparams, env_wrapper, callbacks, vec_env_wrapper

    def create_envs(self, n_envs: int, eval_env: bool = False, no_log: bool = False) -> VecEnv:
        env_wrapper, seed = self.env_wrapper, self.seed
        if eval_env:
            self.env_wrapper, self.seed = self.eval_env_wrapper, seed + EVAL_SEED_OFFSET
        if self.needs_replay:
            inner = self.env_wrapper
            self.env_wrapper = lambda env: EpisodeReplay(env if inner is None else inner(env))
        try:
            self.envs.append(super().create_envs(n_envs, eval_env, no_log))
            return self.envs[-1]
        finally:
            self.env_wrapper, self.seed = env_wrapper, seed

    def create_callbacks(self) -> None:
        super().create_callbacks()
        (evaluation,) = [callback for callback in self.callbacks if isinstance(callback, EvalCallback)]
        evaluation.verbose = 0
        if self.run.stop_return is not None:
            evaluation.callback = StopOnReturn(self.run.stop_return)
            evaluation.callback.parent = evaluation
        if self.is_resumable:
            self.callbacks.insert(0, ExactCheckpointCallback(Path(self.run.folder, "checkpoints"), verbose=0))
            self.callbacks.append(CurvesCallback())
            self.callbacks.append(SnapshotCallback(Path(self.run.folder, "snapshots")))
        if issubclass(ALGOS[self.run.algo], OnPolicyAlgorithm):
            self.callbacks.append(ConstantWeightsCallback())
        self.callbacks.append(StatusCallback(Path(self.run.folder, "status.json"), evaluation))


def use_lean_cnn(algorithm: type[BaseAlgorithm], hyperparams: dict[str, Any], dtype: str) -> None:
    """
    :param algorithm: Algorithm
    :param hyperparams: Its arguments for Atari games, changed in place: the network is the same, computed faster
    :param dtype: Precision of ``LeanNatureCNN``
    """
    policy_kwargs = dict(hyperparams.get("policy_kwargs") or {})
    extractor_kwargs = {**policy_kwargs.get("features_extractor_kwargs", {}), "dtype": dtype}
    policy_kwargs.update(features_extractor_class=LeanNatureCNN, features_extractor_kwargs=extractor_kwargs)
    hyperparams["policy_kwargs"] = policy_kwargs
    if algorithm.policy_aliases.get(hyperparams["policy"]) is ActorCriticCnnPolicy:
        # The same policy, without the floats that SB3 makes of images
        hyperparams["policy"] = PixelActorCriticCnnPolicy


def is_resumable(algorithm: type[BaseAlgorithm], hyperparams: dict[str, Any]) -> bool:
    """
    :param algorithm: Algorithm
    :param hyperparams: Its entries in RL Zoo
    :return: Whether ``ExactCheckpointCallback`` will support its models
    """
    without_lstm = issubclass(algorithm, OnPolicyAlgorithm) and algorithm.__name__ != "RecurrentPPO"
    return without_lstm and not hyperparams.get("use_sde", False)


def has_visible_state(env_id: str) -> bool:
    """
    :param env_id: Environment
    :return: Whether its state can be taken as it is
    """
    env = gym.make(env_id)
    try:
        env.reset(seed=0)
        get_state(env)
    except StateError:
        return False
    finally:
        env.close()
    return True


def whole_games(env_wrapper: Any) -> Any:
    """
    :param env_wrapper: Wrappers as in RL Zoo's presets
    :return: The same with Atari's life loss switched off: SB3's wrapper for it carries a game over into the next evaluation
    """
    if isinstance(env_wrapper, list):
        return [whole_games(wrapper) for wrapper in env_wrapper]
    name, kwargs = next(iter(env_wrapper.items())) if isinstance(env_wrapper, dict) else (env_wrapper, {})
    if name != "stable_baselines3.common.atari_wrappers.AtariWrapper":
        return env_wrapper
    return {name: {**kwargs, "terminal_on_life_loss": False}}


def train_run(run: Run) -> str | None:
    """
    Train, or go on with, one run of a study. Where another process is at it, wait for that one to end: a run that came to
    its end is not run again.

    :param run: The run
    :return: None, or what went wrong; it is in the run's ``error.txt`` as well
    """
    folder = Path(run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        return None if run.finished else _train_or_tell(run)


def _train_or_tell(run: Run) -> str | None:
    folder = Path(run.folder)
    error_file = folder / "error.txt"
    try:
        with open(folder / "printed.txt", "a") as printed, contextlib.redirect_stdout(printed):
            _train(run)
    except Exception:
        error_file.write_text(traceback.format_exc())
        return traceback.format_exc(limit=-1).splitlines()[-1]
    error_file.unlink(missing_ok=True)
    return None


def _train(run: Run) -> None:
    register()
    th.set_num_threads(run.n_threads)
    set_random_seed(run.seed)
    with wandb_run_of(run) as url:
        settings = {**asdict(run), **provenance(), "wandb_url": url}
        # A study can be moved
        del settings["folder"]
        write_atomically(Path(run.folder, "run.json"), json.dumps(settings, indent=1).encode())
        manager = StudyManager(run)
        try:
            result = manager.setup_experiment()
            assert result is not None
            manager.learn(result[0])
            manager.save_trained_model(result[0])
        finally:
            for env in manager.envs:
                env.close()


@contextlib.contextmanager
def wandb_run_of(run: Run) -> Iterator[str | None]:
    """
    Within it, a run of Weights & Biases is active: the one that the run had before, if it had one.

    :param run: Run of a study
    :return: its address, if it has one
    """
    if run.wandb == "disabled":
        yield None
        return
    import wandb

    with wandb.init(
        project=f"sb3_qac-{run.env_id}",
        name=run.name,
        group=run.group,
        id=wandb_run_id(Path(run.folder, "checkpoints")),
        resume="allow",
        mode=run.wandb,  # type: ignore[arg-type]
        dir=run.folder,
        config=asdict(run),
        settings=wandb.Settings(silent=True, console="off"),
    ) as wandb_run:
        yield wandb_run.url


def provenance() -> dict[str, Any]:
    """:return: versions, git commit and machine"""
    commit = subprocess.run(
        ["git", "-C", str(Path(sb3_qac.__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "versions": {
            "python": platform.python_version(),
            "sb3_qac": sb3_qac.__version__,
            "stable_baselines3": stable_baselines3.__version__,
            "torch": th.__version__,
            "gymnasium": gym.__version__,
        },
        "commit": commit or None,
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "gpu": th.cuda.get_device_name(0) if th.cuda.is_available() else None,
        },
    }


def config_of(algo: str, env_id: str) -> str | None:
    """
    :param algo: Algorithm, by its name in RL Zoo
    :param env_id: Environment
    :return: YAML file of this package for it, where it has one for such environments; None for RL Zoo's own
    """
    if algo in ALGORITHMS:
        return str(presets(algo))
    if algo == "a2c":
        known = yaml.safe_load(presets("a2c").read_text())
        if env_id in known or ExperimentManager.is_atari(env_id):
            return str(presets("a2c"))
    return None
