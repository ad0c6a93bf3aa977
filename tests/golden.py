"""
What must not change while code moves: reports of the packed studies, parameters after training, and checkpoints.

    python -m tests.golden      # writes tests/golden/ anew; only after a change of numbers that is wanted
"""

import copy
import json
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

# It replaces gymnasium's TimeLimit, which the checkpoints have; a report no longer imports it
import rl_zoo3  # noqa: F401
import torch as th
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import CallbackList, EvalCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize, VecTransposeImage

from sb3_qac import QA2C, QPPO, REINFORCE
from sb3_qac.common.callbacks import ExactCheckpointCallback
from sb3_qac.common.env_util import to_ale_vec_env
from sb3_qac.common.wrappers import EpisodeReplay

RESULTS = Path(__file__).parent.parent / "results"
GOLDEN = Path(__file__).parent / "golden"
REPORTS, PARAMETERS, CHECKPOINTS = GOLDEN / "reports.json.xz", GOLDEN / "parameters.json", GOLDEN / "checkpoints"
# Intervals of a bootstrap with so few repetitions mean nothing, but they are the same numbers
N_BOOTSTRAP, N_BOOTSTRAP_OF_RANKS = 50, 20

QA2C_ARGS = dict(pg_coef=1.0, ent_coef=0.01, n_steps=5)
QPPO_ARGS: dict[str, Any] = dict(n_steps=16, batch_size=32, n_epochs=2)
SMALL = dict(net_arch=[8])


class Pooled(BaseFeaturesExtractor):
    """
    Means of 12 x 12 pixels of each image: few parameters, so that a checkpoint is small.

    :param observation_space: Images, shape (4, 84, 84)
    """

    def __init__(self, observation_space: gym.spaces.Box) -> None:
        super().__init__(observation_space, 4 * 7 * 7)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return th.nn.functional.avg_pool2d(observations, 12).flatten(1)


class Halves(gym.ObservationWrapper):
    """CartPole's observation in two parts."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        half = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = gym.spaces.Dict(place=half, angle=half)

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {"place": observation[:2], "angle": observation[2:]}


def cartpole(wrapper: Callable[[gym.Env], gym.Env] | None = None) -> VecEnv:
    return make_vec_env("CartPole-v1", n_envs=4, seed=0, wrapper_class=wrapper)


def pong() -> VecEnv:
    return VecTransposeImage(VecFrameStack(to_ale_vec_env(make_atari_env("PongNoFrameskip-v4", n_envs=2, seed=0)), 4))


def model_of(algorithm: type[BaseAlgorithm], env: VecEnv, policy: str = "MlpPolicy", **kwargs: Any) -> BaseAlgorithm:
    # SB3's A2C writes into the dictionary that it is given
    kwargs = copy.deepcopy({"policy_kwargs": SMALL, "seed": 0, "device": "cpu", **kwargs})
    return algorithm(policy, env, **kwargs)  # type: ignore[arg-type]


# A model and the number of steps of its 20 or more updates
TRAININGS: dict[str, tuple[Callable[[], BaseAlgorithm], int]] = {
    "qa2c all actions": (lambda: model_of(QA2C, cartpole(), **QA2C_ARGS), 400),
    "qa2c baseline": (lambda: model_of(QA2C, cartpole(), baseline=True, **QA2C_ARGS), 400),
    "qa2c beta": (lambda: model_of(QA2C, cartpole(), beta=1.0, **QA2C_ARGS), 400),
    "qa2c sampled": (lambda: model_of(QA2C, cartpole(), policy_gradient="sampled", **QA2C_ARGS), 400),
    "qa2c sampled, baseline": (lambda: model_of(QA2C, cartpole(), policy_gradient="sampled", baseline=True, **QA2C_ARGS), 400),
    "qa2c dueling, shrinkage": (
        lambda: model_of(QA2C, cartpole(), beta=1.0, shrinkage=1.0, policy_kwargs=dict(**SMALL, dueling=True), **QA2C_ARGS),
        400,
    ),
    "qa2c defaults": (lambda: model_of(QA2C, cartpole(), policy_kwargs={}), 400),
    "qa2c dict": (lambda: model_of(QA2C, cartpole(Halves), "MultiInputPolicy", **QA2C_ARGS), 400),
    "qa2c normalized": (lambda: model_of(QA2C, VecNormalize(cartpole(), gamma=0.99), **QA2C_ARGS), 400),
    "qppo all actions": (lambda: model_of(QPPO, cartpole(), **QPPO_ARGS), 640),
    "qppo sampled": (lambda: model_of(QPPO, cartpole(), policy_gradient="sampled", **QPPO_ARGS), 640),
    "qppo shrinkage": (lambda: model_of(QPPO, cartpole(), shrinkage=0.1, **QPPO_ARGS), 640),
    "qppo dict": (lambda: model_of(QPPO, cartpole(Halves), "MultiInputPolicy", **QPPO_ARGS), 640),
    "reinforce": (
        lambda: model_of(REINFORCE, make_vec_env("CartPole-v1", n_envs=1, seed=0)),
        3000,
    ),
    "a2c": (lambda: model_of(A2C, cartpole()), 400),
    "ppo": (lambda: model_of(PPO, cartpole(), **QPPO_ARGS), 640),
    "qa2c native pong": (
        lambda: model_of(QA2C, pong(), "CnnPolicy", policy_kwargs=dict(features_extractor_class=Pooled), **QA2C_ARGS),
        200,
    ),
}

# Runs whose checkpoint is kept, with the further callbacks of their `learn`
RESUMED: dict[str, Callable[[], tuple[BaseAlgorithm, list]]] = {
    **{
        name.replace(" ", "-"): lambda name=name: (TRAININGS[name][0](), [])  # type: ignore[misc]
        for name in ("qa2c all actions", "qa2c beta", "qa2c normalized", "qa2c dict", "qppo shrinkage", "reinforce", "a2c")
    },
    "qppo-evaluated": lambda: (model_of(QPPO, cartpole(), **QPPO_ARGS), [EvalCallback(cartpole(), eval_freq=50, verbose=0)]),
    "ppo-replayed": lambda: (model_of(PPO, cartpole(EpisodeReplay), **QPPO_ARGS), []),
    "qa2c-native-pong": lambda: (TRAININGS["qa2c native pong"][0](), [EvalCallback(pong(), eval_freq=10_000, verbose=0)]),
}
STEPS_OF_CHECKPOINT, STEPS_RESUMED = 640, 1280


def norms_of(model: BaseAlgorithm) -> dict[str, float]:
    """:return: the Euclidean norm of each of the policy's parameters; other processors round otherwise"""
    return {name: float(tensor.double().norm()) for name, tensor in model.policy.state_dict().items()}


def train(name: str) -> dict[str, float]:
    make, steps = TRAININGS[name]
    return norms_of(make().learn(steps))


def resume(name: str, folder: Path, steps: int = STEPS_RESUMED) -> dict[str, float]:
    """:return: norms of the parameters after training to a number of steps, with checkpoints in a folder"""
    model, callbacks = RESUMED[name]()
    checkpoints = ExactCheckpointCallback(folder, save_freq=10_000, keep=1, verbose=0)
    return norms_of(model.learn(steps, callback=CallbackList([*callbacks, checkpoints])))


def unpack(name: str, folder: Path) -> None:
    """Write the checkpoint that is kept of a run into a new folder."""
    folder.mkdir()
    (kept,) = (CHECKPOINTS / name).iterdir()
    (folder / kept.stem).write_bytes(lzma.decompress(kept.read_bytes()))


def report(study: str) -> str:
    """:return: the report of a packed study, in Markdown, with few repetitions of the bootstrap"""
    from sb3_qac.study.loading import load_study
    from sb3_qac.study.report import markdown
    from sb3_qac.study.statistics import relative_returns

    folder = RESULTS / study
    envs = load_study(folder)
    relative = len(envs) > 1 and any("a2c" in groups for groups in envs.values())
    return markdown(envs, None, relative_returns(envs, "a2c") if relative else None)


def main() -> None:
    from sb3_qac.study import analysis, statistics

    th.set_num_threads(1)
    for module in (analysis, statistics):
        module.N_BOOTSTRAP, module.N_BOOTSTRAP_OF_RANKS = N_BOOTSTRAP, N_BOOTSTRAP_OF_RANKS
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    reports = {folder.parent.name: report(folder.parent.name) for folder in sorted(RESULTS.glob("*/runs.csv"))}
    REPORTS.write_bytes(lzma.compress(json.dumps(reports, indent=0).encode()))
    parameters: dict[str, Any] = {"trained": {name: train(name) for name in TRAININGS}, "resumed": {}}
    for name in RESUMED:
        resume(name, GOLDEN / "copy", STEPS_OF_CHECKPOINT)
        (checkpoint,) = (GOLDEN / "copy").glob("*.safetensors")
        (CHECKPOINTS / name).mkdir(parents=True)
        (CHECKPOINTS / name / f"{checkpoint.name}.xz").write_bytes(lzma.compress(checkpoint.read_bytes()))
        shutil.rmtree(GOLDEN / "copy")
        unpack(name, GOLDEN / "copy")
        parameters["resumed"][name] = resume(name, GOLDEN / "copy")
        shutil.rmtree(GOLDEN / "copy")
    PARAMETERS.write_text(json.dumps(parameters, indent=1) + "\n")


if __name__ == "__main__":
    # Under its own name, which checkpoints have
    from tests import golden

    golden.main()
