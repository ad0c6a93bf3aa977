"""RL Zoo's ``ExperimentManager`` for one run of a study."""

import contextlib
import dataclasses
import importlib
import inspect
import io
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium as gym
import yaml
from rl_zoo3 import exp_manager
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.utils import ALGOS
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticCnnPolicy, BasePolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import NatureCNN
from stable_baselines3.common.utils import get_device
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac import PQN, QA2C, QPPO
from sb3_qac.common.buffers import DeviceRolloutBuffer
from sb3_qac.common.curves import CurvesCallback
from sb3_qac.common.env_util import to_ale_vec_env
from sb3_qac.common.minatar import check_minatar
from sb3_qac.common.policies import PixelActorCriticCnnPolicy
from sb3_qac.common.torch_layers import LeanNatureCNN, default_net_arch
from sb3_qac.common.wrappers import EpisodeReplay, NewGameOnReset
from sb3_qac.resume import ExactCheckpointCallback
from sb3_qac.resume.checkpoints import checkpoints_in
from sb3_qac.resume.state import StateError, get_state
from sb3_qac.study.callbacks import ConstantWeightsCallback, EvaluateFromReturn, StatusCallback
from sb3_qac.study.run import Run
from sb3_qac.study.snapshots import SnapshotCallback
from sb3_qac.zoo import ALGORITHMS, presets

# Evaluation uses other games than training
EVAL_SEED_OFFSET = 10_000


class StudyManager(ExperimentManager):
    """
    RL Zoo's manager for one run of a study: its folder, its evaluation, exact checkpoints.

    :param run: The run
    """

    # Not only those of our algorithms: they are compared
    fits_every_policy = True
    policy_choice = ""

    def __init__(self, run: Run) -> None:
        import_packages(run.gym_packages)
        check_minatar(run.env_id)
        # RL Zoo would raise a KeyError where there is none
        gym.spec(run.env_id)
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
        # RL Zoo looks for statistics of normalization next to it. Without one that would be in the working directory
        self.trained_agent = f"{run.folder}/checkpoints/none"
        self.save_path = run.folder
        self.params_path = f"{run.folder}/{self.env_name}"
        self.deterministic_eval = run.deterministic
        self.envs: list[VecEnv] = []
        self.is_resumable = self.needs_replay = False

    def read_hyperparameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        hyperparams, saved = super().read_hyperparameters()
        # RL Zoo and SB3 add entries to the dictionaries inside, which the run and the run's file have too
        return copy_containers(hyperparams), saved

    def _preprocess_hyperparams(self, hyperparams: dict[str, Any]) -> Any:
        self.is_resumable = is_resumable(ALGOS[self.run.algo], hyperparams)
        result = super()._preprocess_hyperparams(hyperparams)
        hyperparams, env_wrapper, callbacks, vec_env_wrapper = result
        # RL Zoo sets it before it reads the hyperparameters, which may have some
        self.eval_env_kwargs = self.env_kwargs
        self.needs_replay = (
            self.is_resumable and not self._is_atari and not has_visible_state(self.run.env_id, self.env_kwargs)
        )
        if self._is_atari and self.run.native:
            vec_env_wrapper = with_native_envs(vec_env_wrapper)
        if self._is_atari and self.run.dtype is not None:
            use_lean_cnn(ALGOS[self.run.algo], hyperparams, self.run.dtype)
        if get_device(self.run.device).type == "cuda":
            use_device_buffer(ALGOS[self.run.algo], hyperparams)
        return hyperparams, env_wrapper, callbacks, vec_env_wrapper

    def create_envs(self, n_envs: int, eval_env: bool = False, no_log: bool = False) -> VecEnv:
        env_wrapper, seed = self.env_wrapper, self.seed
        if eval_env:
            # Each seed has games of its own
            self.seed = (EVAL_SEED_OFFSET + self.run.n_eval_episodes * seed) % 2**32
        if eval_env and self._is_atari:
            # The rest as in training, FIRE at the start of each life too: agents do not learn to press it
            self.env_wrapper = wrapped_by(NewGameOnReset, self.env_wrapper)
        if self.needs_replay:
            self.env_wrapper = wrapped_by(EpisodeReplay, self.env_wrapper)
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
            # The first evaluation that reaches it is a new best
            evaluation.callback_on_new_best = StopTrainingOnRewardThreshold(self.run.stop_return)
            evaluation.callback_on_new_best.parent = evaluation
        if self.run.eval_from is not None:
            self.callbacks.insert(self.callbacks.index(evaluation), EvaluateFromReturn(evaluation, self.run.eval_from))
        # The hyperparameters may have one for RL Zoo, with settings of its own
        given = [callback for callback in self.callbacks if isinstance(callback, ExactCheckpointCallback)]
        self.keeps_checkpoints = bool(given)
        self.callbacks = [callback for callback in self.callbacks if callback not in given]
        if self.is_resumable:
            checkpoints = given[0] if given else ExactCheckpointCallback(keep=2, verbose=0)
            checkpoints.folder = Path(self.run.folder, "checkpoints")
            checkpoints.new_episodes = checkpoints.new_episodes or self.run.new_episodes
            self.callbacks.insert(0, checkpoints)
            self.callbacks.append(CurvesCallback())
            self.snapshots = SnapshotCallback(Path(self.run.folder, "snapshots"))
            self.callbacks.append(self.snapshots)
        if issubclass(ALGOS[self.run.algo], OnPolicyAlgorithm):
            self.callbacks.append(ConstantWeightsCallback())
        self.status = StatusCallback(Path(self.run.folder, "status.json"), evaluation)
        self.callbacks.append(self.status)

    def finish(self, model: BaseAlgorithm) -> None:
        """
        :param model: Model whose training has ended: it is saved, and what only a resume needs is deleted
        """
        self.save_trained_model(model)
        if self.is_resumable and model.num_timesteps < model._total_timesteps:
            # It stopped at its return, between two snapshots
            self.snapshots.save()
        self.status.finish()
        if not self.keeps_checkpoints:
            for checkpoint in checkpoints_in(Path(self.run.folder, "checkpoints")):
                checkpoint.unlink()


def import_packages(names: Sequence[str]) -> None:
    """
    :param names: Modules that register environments when they are imported, as RL Zoo's ``--gym-packages``
    :raises ValueError: if one cannot be imported
    """
    for name in names:
        try:
            importlib.import_module(name)
            # RL Zoo evaluates `policy_kwargs` in its module, where they may name classes of these packages
            root = name.partition(".")[0]
            vars(exp_manager).setdefault(root, sys.modules[root])
        except (ImportError, TypeError, ValueError) as error:
            # The others are for a relative name, such as that of a file, and an empty one
            raise ValueError(
                f"`--gym-packages` must be modules that Python can import, but {name!r} was given: {error}. Install it, or "
                "run the command in the folder of its file."
            ) from None


def use_lean_cnn(algorithm: type[BaseAlgorithm], hyperparams: dict[str, Any], dtype: str) -> None:
    """
    :param algorithm: Algorithm
    :param hyperparams: Its arguments for Atari games, changed in place: the network is the same, but computed faster.
        Arguments with another features extractor are not changed.
    :param dtype: Precision of ``LeanNatureCNN``
    :raises ValueError: if the arguments have another network or another precision, and ``dtype`` would have no effect
    """
    policy_kwargs = dict(hyperparams.get("policy_kwargs") or {})
    default = _default_argument(algorithm, hyperparams["policy"], "features_extractor_class")
    if policy_kwargs.get("features_extractor_class", default) not in (NatureCNN, LeanNatureCNN):
        if dtype != "float32":
            raise ValueError(
                f"`dtype` is {dtype!r}, but the hyperparameters have a network of their own, and only NatureCNN has another "
                "precision. Leave `--dtype` out."
            )
        return
    extractor_kwargs = {"dtype": dtype, **(policy_kwargs.get("features_extractor_kwargs") or {})}
    if extractor_kwargs["dtype"] != dtype:
        given = extractor_kwargs["dtype"]
        raise ValueError(
            f"`dtype` is {dtype!r}, but the hyperparameters have {given!r}. Give `--dtype {given}`, or remove theirs."
        )
    net_arch = policy_kwargs.get("net_arch", _default_argument(algorithm, hyperparams["policy"], "net_arch"))
    policy_kwargs.update(
        features_extractor_class=LeanNatureCNN,
        features_extractor_kwargs=extractor_kwargs,
        net_arch=default_net_arch(net_arch, LeanNatureCNN),
    )
    hyperparams["policy_kwargs"] = policy_kwargs
    if algorithm.policy_aliases.get(hyperparams["policy"]) is ActorCriticCnnPolicy:
        # The same policy, without SB3's conversion of images to floats
        hyperparams["policy"] = PixelActorCriticCnnPolicy


def _default_argument(algorithm: type[BaseAlgorithm], policy: str | type[BasePolicy], name: str) -> Any:
    """
    :param algorithm: Algorithm
    :param policy: Name of a policy of the algorithm, or a class of the user's
    :param name: Argument of the policy, such as ``features_extractor_class``
    :return: what the policy has by default; None if that is not known
    """
    if policy in ("CnnPolicy", "CnnLstmPolicy"):
        return {"features_extractor_class": NatureCNN}.get(name)
    policy_class = algorithm.policy_aliases.get(policy, policy)  # type: ignore[arg-type]
    # A name that the algorithm does not have is refused by SB3
    parameters = {} if isinstance(policy_class, str) else inspect.signature(policy_class).parameters
    return parameters[name].default if name in parameters else None


def use_device_buffer(algorithm: type[BaseAlgorithm], hyperparams: dict[str, Any]) -> None:
    """
    :param algorithm: Algorithm
    :param hyperparams: Its arguments, changed in place: a rollout is sent to the device once. Those of algorithms with another
        rollout buffer, and of ``Dict`` observations, are not changed.
    """
    policy = hyperparams["policy"]
    # RL Zoo has replaced the path of a class by the class
    policy_class = algorithm.policy_aliases.get(policy, policy)
    for_dict = algorithm.policy_aliases.get("MultiInputPolicy", MultiInputActorCriticPolicy)
    is_for_dict = isinstance(policy_class, type) and issubclass(policy_class, for_dict)
    if issubclass(algorithm, A2C | PPO | QA2C | QPPO | PQN) and not is_for_dict:
        hyperparams.setdefault("rollout_buffer_class", DeviceRolloutBuffer)


def is_resumable(algorithm: type[BaseAlgorithm], hyperparams: dict[str, Any]) -> bool:
    """
    :param algorithm: Algorithm
    :param hyperparams: Its entries in RL Zoo
    :return: Whether ``ExactCheckpointCallback`` supports its models
    """
    without_lstm = issubclass(algorithm, OnPolicyAlgorithm) and algorithm.__name__ != "RecurrentPPO"
    return without_lstm and not hyperparams.get("use_sde", False)


def has_visible_state(env_id: str, env_kwargs: dict[str, Any]) -> bool:
    """
    :param env_id: Environment
    :param env_kwargs: Its arguments
    :return: Whether its state can be taken without ``EpisodeReplay``
    """
    env = gym.make(env_id, **env_kwargs)
    try:
        env.reset(seed=0)
        get_state(env)
    except StateError:
        return False
    finally:
        env.close()
    return True


def wrapped_by(
    wrapper_class: type[gym.Wrapper], env_wrapper: Callable[[gym.Env], gym.Env] | None
) -> Callable[[gym.Env], gym.Env]:
    """
    :param wrapper_class: A wrapper
    :param env_wrapper: Function that wraps an environment, or None
    :return: the function that puts its result inside the wrapper
    """
    return lambda env: wrapper_class(env if env_wrapper is None else env_wrapper(env))


def with_native_envs(vec_env_wrapper: Callable[[VecEnv], VecEnv] | None) -> Callable[[VecEnv], VecEnv]:
    """
    :param vec_env_wrapper: Function that wraps Atari environments, or None
    :return: the function that first replaces them by native ones
    """
    return to_ale_vec_env if vec_env_wrapper is None else lambda env: vec_env_wrapper(to_ale_vec_env(env))


def copy_containers(value: Any) -> Any:
    """
    :param value: Hyperparameters
    :return: the same in new dictionaries and lists; other objects are not copied
    """
    if isinstance(value, dict):
        return {key: copy_containers(item) for key, item in value.items()}
    return [copy_containers(item) for item in value] if isinstance(value, list) else value


def config_of(algo: str, env_id: str) -> str | None:
    """
    :param algo: Algorithm, by its name in RL Zoo
    :param env_id: Environment
    :return: This package's YAML file, if it has one for the algorithm and the environment; None for RL Zoo's own
    """
    if algo in ALGORITHMS:
        return str(presets(algo))
    if algo in ("a2c", "ppo"):
        known = yaml.safe_load(presets(algo).read_text())
        if env_id in known or ("atari" in known and ExperimentManager.is_atari(env_id)):
            return str(presets(algo))
    return None


@contextlib.contextmanager
def environments_of(run: Run) -> Iterator[VecEnv]:
    """
    :param run: Run of a study
    :return: within it, newly made training environments of the run
    """
    with model_of(run) as model:
        assert model.env is not None
        yield model.env


@contextlib.contextmanager
def model_of(run: Run) -> Iterator[BaseAlgorithm]:
    """
    :param run: Run of a study
    :return: within it, the newly made model of the run, with its training environments
    """
    with tempfile.TemporaryDirectory() as scratch:
        manager = StudyManager(dataclasses.replace(run, folder=scratch, n_eval_episodes=1))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                model, _ = manager.setup_experiment()  # type: ignore[misc]
            yield model
        finally:
            for env in manager.envs:
                env.close()
