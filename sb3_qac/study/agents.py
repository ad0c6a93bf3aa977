"""The final agent of a run: play new episodes with it, or write it as a small file."""

import contextlib
import glob
import io
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
import yaml
from rl_zoo3.utils import ALGOS, get_latest_run_id
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.common.checks import check_number
from sb3_qac.common.files import make_folder
from sb3_qac.common.masks import with_masks
from sb3_qac.common.torch_layers import LeanNatureCNN, constant_weights
from sb3_qac.common.vec_env.ale_vec_env import is_atari
from sb3_qac.study.loading import ENVIRONMENT_ENTRIES, changed_entries, parse_config, read_config
from sb3_qac.study.manager import StudyManager
from sb3_qac.study.run import Run, env_dirname, read_run
from sb3_qac.study.snapshots import save_for_playing
from sb3_qac.study.statistics import standard_error
from sb3_qac.zoo import register
from sb3_qac.zoo.resume import has_agent

# Episodes differ from those of training, and between runs: otherwise all seeds of a study would share their luck
FIRST_SEED, N_ENVS = 12345, 50
NO_IMAGES = (
    "{env_id} cannot be made with the render mode {mode!r}. Its class needs `render_mode` as an argument that it keeps as "
    "`self.render_mode`, {mode!r} in `metadata['render_modes']`, and a method `render` that returns an image."
)


def final_agent(run: Run, folder: Path) -> Path:
    """
    :param run: Settings of a run
    :param folder: Its folder
    :return: the file of its final agent
    :raises ValueError: if the run is not finished, or its agent, settings or statistics of normalization are gone
        or damaged
    """
    agent = folder / f"{env_dirname(run.env_id)}.zip"
    config = agent.with_suffix("") / "config.yml"
    if not replace(run, folder=str(folder)).finished:
        raise ValueError(f"There is no final agent in {folder}: the run is not finished.")
    needed = [agent, config]
    if config.is_file() and read_config(config).get("normalize"):
        # RL Zoo would begin new statistics without a word
        needed.append(config.with_name("vecnormalize.pkl"))
    for path in needed:
        if not path.is_file():
            raise ValueError(f"There is no {path.relative_to(folder)} in {folder}, although the run is finished.")
    if not has_agent(folder, env_dirname(run.env_id)):
        raise ValueError(f"{agent} is damaged. Take another copy of it, or train the run again in another folder.")
    return agent


def check_same_environments(run: Run, folder: Path) -> None:
    """
    :param run: Settings of a run
    :param folder: Its folder
    :raises ValueError: if the run was trained in environments that are made in another way, because its preset or its file of
        hyperparameters has changed since
    """
    config = folder / env_dirname(run.env_id) / "config.yml"
    if not config.is_file():
        return
    with contextlib.redirect_stdout(io.StringIO()):
        hyperparams, _ = StudyManager(run).read_hyperparameters()
    different = changed_entries(parse_config(yaml.dump(hyperparams)), read_config(config), ENVIRONMENT_ENTRIES)
    if different:
        raise ValueError(
            f"{folder} was trained in other environments: {'; '.join(different)}. Its preset or its file of hyperparameters "
            "has changed since. Restore that, or use the version of sb3_qac in its run.json."
        )


@contextlib.contextmanager
def player_env(
    run: Run, folder: Path, scratch: Path, n_envs: int = 1, render_mode: str | None = None
) -> Iterator[tuple[VecEnv, BaseAlgorithm]]:
    """
    :param run: Settings of a run
    :param folder: Its folder
    :param scratch: Folder for temporary files
    :param n_envs: How many environments
    :param render_mode: "rgb_array" for images, which Atari games give with SB3's environments only; None for the environments
        of the run's evaluations
    :return: within it, the environments and the final agent, whose weights must not be changed
    :raises ValueError: if there is no agent, it was trained in other environments, or these have no such render mode
    """
    with contextlib.redirect_stdout(io.StringIO()):
        manager = StudyManager(replace(run, folder=str(scratch)))
        agent = final_agent(run, folder)
        check_same_environments(run, folder)
        hyperparams, _ = manager.read_hyperparameters()
        _, manager.env_wrapper, _, manager.vec_env_wrapper = manager._preprocess_hyperparams(hyperparams)
        # For the statistics of normalized observations, which are stored next to the agent
        manager.trained_agent = str(agent)
        if render_mode is not None:
            manager.eval_env_kwargs = {**manager.eval_env_kwargs, "render_mode": render_mode}
        try:
            env = manager.create_envs(n_envs, eval_env=True, no_log=True)
        except TypeError as error:
            # Gymnasium tells those who wrote the environment so
            if render_mode is None or "render_mode" not in str(error):
                raise
            raise ValueError(NO_IMAGES.format(env_id=run.env_id, mode=render_mode)) from None
    try:
        if render_mode is not None and not _renders(env, render_mode):
            raise ValueError(NO_IMAGES.format(env_id=run.env_id, mode=render_mode))
        model = ALGOS[run.algo].load(agent, device="cpu")
        with constant_weights(model.policy):
            yield env, with_masks(model, env)
    finally:
        env.close()


def _renders(env: VecEnv, render_mode: str) -> bool:
    modes = env.get_attr("metadata")[0].get("render_modes", [])
    return render_mode in modes and env.get_attr("render_mode")[0] == render_mode


def evaluate_agent(folder: Path, n_episodes: int = 1000) -> dict[str, Any]:
    """
    Play new episodes with the final agent of a run, with sampled and with greedy actions.

    :param folder: Folder of a finished run of a study
    :param n_episodes: Whole episodes of each
    :return: ``env``, ``run``, ``episodes``; for ``sampled`` and ``greedy`` actions the mean raw return, its standard deviation
        over episodes (``sampled_std``), its standard error (``sampled_error``), and how many different pairs of return and
        length there are (``sampled_different``)
    :raises ValueError: if there is no agent in the folder
    """
    check_number("episodes", n_episodes, minimum=1)
    register()
    run = read_run(folder)
    seed = (FIRST_SEED + N_ENVS * run.seed) % 2**32
    result: dict[str, Any] = {"env": run.env_id, "run": folder.name, "episodes": n_episodes}
    n_envs = min(N_ENVS, n_episodes)
    with tempfile.TemporaryDirectory() as scratch, player_env(run, folder, Path(scratch), n_envs) as (env, model):
        for name, deterministic in {"sampled": False, "greedy": True}.items():
            set_random_seed(seed)
            env.seed(seed)
            returns, lengths = evaluate_policy(model, env, n_episodes, deterministic, return_episode_rewards=True)
            result[name] = float(np.mean(returns))
            result[f"{name}_std"] = float(np.std(returns, ddof=1)) if n_episodes > 1 else None
            result[f"{name}_error"] = standard_error(np.array(returns)) if n_episodes > 1 else None
            result[f"{name}_different"] = np.unique(np.array([returns, lengths]), axis=1).shape[1]
    return result


def evaluation_line(result: dict[str, Any]) -> str:
    """
    :param result: Result of ``evaluate_agent``
    :return: a line of text to print
    """
    parts = []
    for name in ("sampled", "greedy"):
        notes = [] if result[f"{name}_std"] is None else [f"std {result[f'{name}_std']:.2f}"]
        if is_atari(gym.spec(result["env"])) and result[f"{name}_different"] < result["episodes"]:
            # Without sticky actions many greedy games are the same
            notes.append(f"{result[f'{name}_different']} different games")
        parts.append(f"{name} {result[name]:.2f}" + (f" ({', '.join(notes)})" if notes else ""))
    return f"{result['env']} {result['run']}: {', '.join(parts)}, n = {result['episodes']:,}"


def export_agent(folder: Path, output: Path) -> Path:
    """
    Write the final agent of a run as a small file, where RL Zoo's ``enjoy`` and ``record_video`` find it. The file is
    compressed and has no state of the policy's optimizer. Layers that a bfloat16 network rounds before use are stored already
    rounded. The agent plays exactly the same. Agents that are there already stay.

    :param folder: Folder of a finished run of a study
    :param output: RL Zoo's folder of logs
    :return: the agent's file
    :raises ValueError: if there is no agent in the folder
    """
    register()
    run = read_run(folder)
    name = env_dirname(run.env_id)
    model = ALGOS[run.algo].load(final_agent(run, folder), device="cpu")
    model.tensorboard_log = None
    # SAC's policy has none of its own
    extractor = getattr(model.policy, "features_extractor", None)
    if isinstance(extractor, LeanNatureCNN) and extractor.dtype == th.bfloat16:
        # Not the first layer: it is divided by 255 before it is rounded
        for parameter in [*extractor.cnn[2:].parameters(), *extractor.linear.parameters()]:
            parameter.data = parameter.data.to(th.bfloat16)
    # As RL Zoo numbers runs. `enjoy` plays the last one, so it must be whole
    number = get_latest_run_id(glob.escape(str(output / run.algo)), name) + 1
    kept = output / run.algo / f"{name}_{number}"
    with tempfile.TemporaryDirectory(prefix=".export-", dir=make_folder(kept.parent)) as scratch:
        made = Path(scratch, kept.name)
        shutil.copytree(folder / name, made / name, ignore=shutil.ignore_patterns("args.yml", "command.txt"))
        save_for_playing(model, made / f"{name}.zip")
        compress(made / f"{name}.zip")
        made.rename(kept)
    return kept / f"{name}.zip"


def compress(path: Path) -> None:
    """:param path: A zip file, which SB3 writes without compression"""
    with zipfile.ZipFile(path) as archive:
        contents = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
