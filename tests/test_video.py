"""Videos of whole games."""

import contextlib
import dataclasses
import json
import weakref
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest

from sb3_qac.__main__ import main
from sb3_qac.study.grid import make_grid, run_study
from sb3_qac.study.video import record_videos, summary


# imageio leaves ffmpeg's pipes to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_video_shows_whole_games(tmp_path, capsys):
    settings = dict(n_timesteps=400, eval_freq=400, n_eval_episodes=2, wandb="disabled", device="cpu")
    # With this seed no game is as long as the limit, so that there are fewer images
    (run,) = make_grid("cartpole", ["task1"], [10], tmp_path, **settings)
    command = ["video", run.folder, "--games", "2", "--json"]
    with pytest.raises(SystemExit, match="no run of a study"):
        main(command)
    assert run_study([run]) == {}
    capsys.readouterr()
    assert main(command) == 0
    returns = json.loads(capsys.readouterr().out)
    assert {name: len(of_games) for name, of_games in returns.items()} == {"sampled": 2, "greedy": 2}
    for name, of_games in returns.items():
        path = Path(run.folder, "videos", f"{name}.mp4")
        with imageio.get_reader(path) as reader:
            images = [np.asarray(image) for image in reader]
        # A step of CartPole is worth 1
        assert len(images) == sum(of_games) and path.stat().st_size > 5_000
        assert images[0].shape == (400, 600, 3) and images[0].std() > 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_video_keeps_no_images_in_memory(tmp_path, monkeypatch):
    images, n_kept = [], []

    def play(*args):
        for _ in range(20):
            images.append(weakref.ref(image := np.zeros((32, 32, 3), dtype=np.uint8)))
            yield image
            del image
            n_kept.append(sum(kept() is not None for kept in images))

    monkeypatch.setattr("sb3_qac.study.video.play", play)
    monkeypatch.setattr("sb3_qac.study.video.player_env", lambda *args, **kwargs: contextlib.nullcontext((Mock(), None)))
    (run,) = make_grid("cartpole", ["task1"], [0], tmp_path)
    Path(run.folder).mkdir()
    Path(run.folder, "run.json").write_text(json.dumps(dataclasses.asdict(run)))
    record_videos(Path(run.folder), tmp_path / "videos", n_games=1)
    # The one that is written
    assert max(n_kept) <= 1 and len(images) == 40


class FiveSteps(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, dtype=np.float32), {}

    def step(self, action):
        return np.zeros(3, dtype=np.float32), 1.0, False, False, {}

    def render(self):
        # Odd, and H.264 cannot have that
        return np.full((35, 51, 3), 200, dtype=np.uint8)


class ModeNotKept(FiveSteps):
    metadata: ClassVar[dict] = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, render_mode=None):
        pass


class ModesOfTheInstance(FiveSteps):
    def __init__(self, render_mode=None):
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
        self.render_mode = render_mode


class NoModes(FiveSteps):
    def __init__(self, render_mode=None):
        self.render_mode = render_mode


def run_of(creator, folder):
    """:return: a trained run in environments of the creator"""
    gym.registry.pop("FiveSteps-v0", None)
    gym.register("FiveSteps-v0", creator, max_episode_steps=5)
    settings = dict(n_timesteps=20, eval_freq=20, n_eval_episodes=1, wandb="disabled", device="cpu")
    (run,) = make_grid("FiveSteps-v0", ["a2c"], [0], folder, **settings)
    assert run_study([run]) == {}
    return run


# Gymnasium warns of them too
@pytest.mark.filterwarnings("ignore:.*render")
@pytest.mark.parametrize(
    "creator",
    [FiveSteps, ModeNotKept, NoModes, lambda **kwargs: NoModes(**kwargs)],
    ids=["none", "lost", "no modes", "function"],
)
def test_a_video_of_an_environment_that_draws_no_images_is_refused(creator, tmp_path):
    run = run_of(creator, tmp_path)
    with pytest.raises(SystemExit, match="FiveSteps-v0 cannot be made with the render mode 'rgb_array'"):
        main(["video", run.folder])
    assert not list(Path(run.folder, "videos").glob("*"))


@pytest.mark.filterwarnings("ignore:.*render", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_images_of_an_odd_size_get_another_line_and_column(tmp_path):
    run = run_of(ModesOfTheInstance, tmp_path)
    assert main(["video", run.folder, "--games", "1"]) == 0
    with imageio.get_reader(Path(run.folder, "videos", "greedy.mp4")) as reader:
        assert [np.asarray(image).shape for image in reader] == 5 * [(36, 52, 3)]


@pytest.mark.slow
def test_the_same_seed_shows_the_same_games(tmp_path):
    settings = dict(n_timesteps=400, eval_freq=800, n_eval_episodes=2, wandb="disabled", device="cpu")
    (run,) = make_grid("Acrobot-v1", ["ppo"], [0], tmp_path, **settings)
    assert run_study([run]) == {}
    first, second = (record_videos(Path(run.folder), tmp_path / name, 1) for name in ("one", "two"))
    assert first == second and all(line.endswith(")") for line in summary(first))
