"""The ladder: every rung in the study's grid, and one page of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch as th
from PIL import Image
from rl_zoo3.utils import ALGOS
from stable_baselines3 import A2C, PPO

from benchmarks.ladder import RUNGS, _median, gradients_of_updates, noise_of_run, write_page
from sb3_qac import QA2C, REINFORCE
from sb3_qac.study.catalogue import STUDIES, TASKS, field_name
from sb3_qac.study.grid import make_grid, run_study

SMALL = dict(n_timesteps=1600, eval_freq=800, n_eval_episodes=2, wandb="disabled", device="cpu")


def test_every_rung_can_be_run(tmp_path):
    assert STUDIES["ladder"].algos == tuple(RUNGS)
    runs = make_grid("ladder", list(RUNGS), [0], tmp_path, **SMALL)
    assert [(field_name(run.group), (run.algo, run.hyperparams)) for run in runs] == [
        (name, TASKS.get(name, (name, {}))) for name in RUNGS
    ]
    # A name of RL Zoo stays what it is there
    assert not set(TASKS) & set(ALGOS)


@pytest.mark.parametrize("algorithm", [QA2C, REINFORCE, A2C, PPO])
def test_gradients_are_collected_without_learning(algorithm):
    kwargs = {QA2C: {"n_steps": 16}, A2C: {"n_steps": 16}, PPO: {"n_steps": 16, "batch_size": 16}}.get(algorithm, {})
    model = algorithm("MlpPolicy", "CartPole-v1", seed=0, device="cpu", **kwargs)
    before = [parameter.clone() for parameter in model.policy.parameters()]
    gradients, steps = gradients_of_updates(model, 160)
    assert all(map(th.equal, before, model.policy.parameters()))
    # 64 units and a bias for each of 2 actions
    assert {len(gradient) for gradient in gradients} == {2 * 64 + 2}
    assert steps == 16 if algorithm is not REINFORCE else steps > 5
    assert len({float(gradient.norm()) for gradient in gradients}) == len(gradients)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_noise")
def test_the_page_has_each_rung_in_its_order(tmp_path):
    runs = make_grid("ladder", ["dqn", "task1", "reinforce-to-go"], [0], tmp_path, **SMALL)
    assert run_study(runs) == {}
    text = write_page(tmp_path).read_text()
    rows = [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["rung", "reinforce-to-go", "all-action", "dqn"]
    assert "`sum_a pi(a) Q(a)`" in text and "Unfinished" not in text
    with Image.open(tmp_path / "ladder.png") as image:
        # 13 inches wide, and not blank
        assert image.width == 13 * 85 and len(set(image.convert("RGB").getdata())) > 20
    assert (tmp_path / "ladder.png").stat().st_size > 5_000 and "<table>" in (tmp_path / "ladder.html").read_text()
    noise = noise_of_run(Path(runs[1].folder))
    assert noise is not None and noise["variance"] > 0
    assert f"| {noise['variance']:.2g} |" in next(line for line in text.splitlines() if line.startswith("| all-action"))
    assert noise_of_run(Path(runs[0].folder)) is None


def test_what_was_never_reached_is_larger_than_what_was():
    assert _median([3.0, 1.0, None], ".0f") == "3"
    # Between 3 and infinity there is no middle
    assert _median([3.0, 1.0, None, None], ".0f") == _median([None], ".0f") == _median([], ".0f") == "-"


def write_evaluations(study, seed, returns):
    folder = study / f"task1_seed-{seed}"
    folder.mkdir()
    settings = dict(name=folder.name, group="task1", seed=seed, env_id="CartPole-v1", n_eval_episodes=1)
    settings.update(algo="qa2c", folder="", deterministic=False)
    (folder / "run.json").write_text(json.dumps(settings))
    np.savez(folder / "evaluations.npz", timesteps=[1000, 2000], results=returns)


def test_solved_means_an_evaluation_at_the_threshold(tmp_path):
    for seed, returns in enumerate(([[400.0], [475.0]], [[475.0], [475.0]], [[474.0], [474.0]])):
        write_evaluations(tmp_path, seed, returns)
    # 475, 475 and 474 at the end: variance 1/3, over 3 seeds. After 2,000 steps, 1,000 and never: the median is 2,000
    assert "| 3 | 474.7 +/- 0.3 | 2 of 3 | 2,000 | - | - |" in write_page(tmp_path).read_text()


def test_a_single_seed_has_no_standard_error(tmp_path):
    write_evaluations(tmp_path, 0, [[400.0], [475.0]])
    assert "| 1 | 475.0 | 1 of 1 | 2,000 | - | - |" in write_page(tmp_path).read_text()
