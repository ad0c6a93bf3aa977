"""Every tool of the package knows QPPO: a small study of it and its variant on the sampled action."""

import json
import signal
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch as th
import wandb

from benchmarks import pack
from sb3_qac import QPPO
from sb3_qac.__main__ import main
from sb3_qac.common.files import read_json
from sb3_qac.resume.checkpoints import checkpoints_in
from sb3_qac.study.catalogue import field_name
from sb3_qac.study.grid import make_grid, run_study
from sb3_qac.study.loading import load_study
from sb3_qac.study.report import write_report
from sb3_qac.study.train import train_run
from tests.wandb_files import wandb_ids, wandb_parts

SMALL = dict(n_timesteps=1000, eval_freq=500, n_eval_episodes=2, wandb="disabled", device="cpu")
GROUPS = ["qppo", "qppo-sampled"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies") / "cartpole"
    assert run_study(make_grid("cartpole", [*GROUPS, "a2c"], [0], folder, **SMALL)) == {}
    return folder


def test_a_study_trains_both_variants_with_the_preset(study):
    runs = {group: read_json(study / f"{group}_seed-0" / "run.json") for group in GROUPS}
    assert {(run["algo"], run["group"], field_name(run["name"])) for run in runs.values()} == {
        ("qppo", group, f"{group}_seed-0") for group in GROUPS
    }
    models = {group: QPPO.load(study / f"{group}_seed-0" / "CartPole-v1.zip", device="cpu") for group in GROUPS}
    assert [model.policy_gradient for model in models.values()] == ["all-action", "sampled"]
    # And nothing else differs
    assert {(model.n_steps, model.batch_size, model.n_epochs, model.beta) for model in models.values()} == {(32, 64, 10, 1.0)}


def test_a_report_compares_both_variants_with_each_other_and_with_a2c(study, tmp_path):
    text = write_report(study, output=tmp_path).read_text()
    assert text.startswith("# CartPole-v1: a2c, qppo, qppo-sampled\n")
    assert "Number of seeds: 1 of a2c, 1 of qppo and 1 of qppo-sampled." in text
    assert all(f"| {pair} |" in text for pair in ("qppo minus a2c", "qppo-sampled minus a2c", "qppo-sampled minus qppo"))
    (record,) = load_study(study)["CartPole-v1"]["qppo"]
    drawn = {"rollout/ep_rew_mean", "train/entropy_loss", "train/explained_variance", "train/value_loss", "train/policy_loss"}
    assert set(record.curves) == drawn | {"train/grad_norm"}


def test_a_packed_study_keeps_the_names_and_the_commands(study, tmp_path, capsys):
    assert pack.main([str(study), "--output", str(tmp_path / "packed")]) == 0
    runs = pd.read_csv(tmp_path / "packed" / "runs.csv").set_index("run")
    assert runs.loc["qppo-sampled_seed-0", ["group", "algo"]].tolist() == ["qppo-sampled", "qppo"]
    assert "--algos qppo-sampled --seeds 0 --steps 1000" in runs.loc["qppo-sampled_seed-0", "command"]
    assert list(load_study(tmp_path / "packed")["CartPole-v1"]) == ["a2c", *GROUPS]


def test_agents_are_played_exported_and_played_again(study, tmp_path, capsys, rl_zoo):
    run = study / "qppo-sampled_seed-0"
    assert main(["evaluate", str(run), "--episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "qppo-sampled_seed-0"
    assert main(["export", str(run), str(tmp_path)]) == 0
    agent = tmp_path / "qppo" / "CartPole-v1_1" / "CartPole-v1.zip"
    assert zipfile.is_zipfile(agent) and QPPO.load(agent, device="cpu").policy_gradient == "sampled"
    enjoy = ["--algo", "qppo", "--env", "CartPole-v1", "-f", tmp_path, "--no-render", "-n", 100]
    assert "Episode Reward" in rl_zoo("enjoy", *enjoy, cwd=tmp_path)


# imageio leaves ffmpeg's pipes to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_video_shows_a_game(study, capsys):
    run = study / "qppo_seed-0"
    assert main(["video", str(run), "--games", "1", "--json"]) == 0
    assert {name: len(games) for name, games in json.loads(capsys.readouterr().out).items()} == {"sampled": 1, "greedy": 1}
    assert (run / "videos" / "sampled.mp4").stat().st_size > 1000
    assert main(["video", str(run), "--games", "1"]) == 0
    assert f"The videos are in {run / 'videos'}." in capsys.readouterr().out


def test_a_diagnosis_measures_its_gradients_and_plays_actions_on_purpose(study, tmp_path, capsys):
    run = study / "qppo_seed-0"
    assert main(["diagnose", str(run), *"--rollouts 3 --points 2 --states 8 --repeats 2 --json".split()]) == 0
    points = json.loads(capsys.readouterr().out)[str(run)]
    model = QPPO.load(run / "CartPole-v1.zip", device="cpu")
    # The running scale, moved by one rollout
    assert points[1]["scale"] == pytest.approx(model.sigma, rel=0.05)
    assert [point["branches"]["states"] for point in points] == [8, 8]
    text = write_report(study, output=tmp_path).read_text()
    assert "Third table: every action was played from the same visited states" in text
    assert "| 0 | 8 x 2 |" in text and "| 1,000 | 8 x 2 |" in text and "| sampled, return - V~ (A2C's weight) |" in text


# ---- exact resume ----


@pytest.fixture
def ctrl_c_at_update(ctrl_c, monkeypatch):
    """Ctrl-C in one of QPPO's updates."""
    train = QPPO.train

    def interrupt_at(n_updates):
        def train_or_interrupt(model):
            if model._n_updates == n_updates:
                signal.raise_signal(signal.SIGINT)
            train(model)

        monkeypatch.setattr(QPPO, "train", train_or_interrupt)

    return interrupt_at


def assert_same_agent(one, other):
    one, other = (QPPO.load(path, device="cpu") for path in (one, other))
    assert all(map(th.equal, one.policy.state_dict().values(), other.policy.state_dict().values()))
    assert (one.sigma, one.num_timesteps) == (other.sigma, other.num_timesteps)


def test_a_run_that_was_interrupted_goes_on_exactly_and_in_its_run_of_wandb(study, tmp_path, ctrl_c_at_update, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(wandb, "run", None)
    (run,) = make_grid("cartpole", ["qppo"], [0], tmp_path, **{**SMALL, "wandb": "offline"})
    # Ten epochs for each of four rollouts
    ctrl_c_at_update(20)
    assert train_run(run) is None
    assert not run.finished and checkpoints_in(Path(run.folder, "checkpoints"))
    ctrl_c_at_update(-1)
    assert train_run(run) is None and run.finished
    reference = study / "qppo_seed-0"
    assert_same_agent(Path(run.folder, "CartPole-v1.zip"), reference / "CartPole-v1.zip")
    results = [np.load(Path(folder, "evaluations.npz"))["results"] for folder in (run.folder, reference)]
    np.testing.assert_array_equal(*results)
    # Its service has written everything when it has ended, and other tests start it in other modes
    wandb.teardown()
    parts = wandb_parts(Path(run.folder))
    assert len(parts) == 2 and len(wandb_ids(Path(run.folder))) == 1
    assert {"train/kl", "train/sigma", "train/kl_coef", "train/clip_fraction"} <= set().union(*parts[-1])


def test_a_command_of_rl_zoo_that_was_interrupted_goes_on_exactly(tmp_path, ctrl_c_at_update, rl_zoo):
    callback = "callback:{'sb3_qac.common.callbacks.ExactCheckpointCallback': dict(save_freq=400)}"

    def train(folder):
        settings = ["-n", 1000, "--seed", 3, "--device", "cpu", "--eval-freq", -1, "--num-threads", 1, "-f", folder]
        return rl_zoo("train", "--algo", "qppo", "--env", "CartPole-v1", *settings, "--hyperparams", callback, cwd=tmp_path)

    ctrl_c_at_update(-1)
    train("whole")
    ctrl_c_at_update(20)
    train("parts")
    assert not read_json(tmp_path / "parts" / "qppo" / "CartPole-v1_1" / "checkpoints" / "run.json")["finished"]
    ctrl_c_at_update(-1)
    assert "Resuming from step" in train("parts")
    assert [path.name for path in (tmp_path / "parts" / "qppo").iterdir()] == ["CartPole-v1_1"]
    agents = [tmp_path / folder / "qppo" / "CartPole-v1_1" / "CartPole-v1.zip" for folder in ("whole", "parts")]
    assert_same_agent(*agents)
