"""Videos of trained agents: whole games, with sampled and with greedy actions."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.common.checks import check_number
from sb3_qac.common.files import make_folder
from sb3_qac.study.agents import player_env
from sb3_qac.study.run import read_run
from sb3_qac.zoo import register


def record_videos(folder: Path, output: Path, n_games: int = 3, fps: int = 30) -> dict[str, list[float]]:
    """
    Record the final agent of a run: ``sampled.mp4`` and ``greedy.mp4``.

    :param folder: Folder of a finished run of a study
    :param output: Folder for the videos
    :param n_games: Whole games in each video
    :param fps: Images per second. Atari games show every fourth image: at 15 they are as fast as on the console.
    :return: raw returns of the games, by the name of the video
    :raises ValueError: if there is no agent in the folder, or its environment draws no images
    """
    check_number("games", n_games, minimum=1)
    check_number("fps", fps, minimum=1)
    register()
    run = read_run(folder)
    returns: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        env, model = stack.enter_context(player_env(run, folder, scratch, render_mode="rgb_array"))
        # The videos of an earlier call stay until these are complete
        videos = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".video-", dir=make_folder(output))))
        for name, deterministic in {"sampled": False, "greedy": True}.items():
            set_random_seed(run.seed)
            env.seed(run.seed)
            with imageio.get_writer(videos / f"{name}.mp4", fps=fps, macro_block_size=1) as writer:
                for image in play(model, env, n_games, deterministic, returns.setdefault(name, [])):
                    writer.append_data(image)  # type: ignore[attr-defined]
        for path in videos.iterdir():
            path.replace(output / path.name)
    return returns


def play(model: BaseAlgorithm, env: VecEnv, n_games: int, deterministic: bool, returns: list[float]) -> Iterator[np.ndarray]:
    """
    :param model: Agent
    :param env: A single environment with a ``Monitor``
    :param n_games: Whole games to play
    :param deterministic: Whether the most probable action is taken
    :param returns: List to which the raw returns of the games are added
    :return: images, shape (height, width, 3) each, whose height and width are even
    """
    obs: Any = env.reset()
    state, starts = None, np.ones(1, dtype=bool)
    while len(returns) < n_games:
        image = env.render()
        assert image is not None
        # H.264 halves the resolution of colours
        yield np.pad(image, ((0, image.shape[0] % 2), (0, image.shape[1] % 2), (0, 0)), mode="edge")
        actions, state = model.predict(obs, state=state, episode_start=starts, deterministic=deterministic)
        obs, _, starts, infos = env.step(actions)
        returns += [float(info["episode"]["r"]) for info in infos if "episode" in info]


def summary(returns: dict[str, list[float]]) -> Iterator[str]:
    """
    :param returns: Result of ``record_videos``
    :return: lines of text to print
    """
    for name, of_games in returns.items():
        yield f"{name}.mp4: {', '.join(f'{x:g}' for x in of_games)} (mean {np.mean(of_games):g})"
