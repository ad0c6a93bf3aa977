"""RL Zoo as its users run it: its commands, most of them in the process of the tests."""

import argparse
import copy
import importlib
import json
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import optuna
import pandas
import pytest
import torch as th
import yaml
from gymnasium.envs.registration import EnvSpec
from rl_zoo3.exp_manager import ExperimentManager

from sb3_qac import QA2C, commands, doctor, zoo
from sb3_qac.__main__ import main
from sb3_qac.common.callbacks import ExactCheckpointCallback
from sb3_qac.common.curves import CurvesCallback
from sb3_qac.zoo import search_space
from sb3_qac.zoo.registration import REGISTRATIONS
from sb3_qac.zoo.resume import _arguments_of, resume_wandb, unfinished_run
from tests.envs import ObservationsOf

PRESETS = yaml.safe_load(zoo.presets("qa2c").read_text())
ARGUMENTS = ["--algo", "qa2c", "--env", "CartPole-v1"]


def python(*arguments, cwd, **environment):
    """:return: what a new interpreter printed; its exit code must be 0"""
    run = subprocess.run(
        [sys.executable, "-W", "default", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a short run. The literal command, in a process of its own: tests/test_install.py"""
    folder = tmp_path_factory.mktemp("zoo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", sys.argv)
        main(["zoo", "train", *ARGUMENTS, "-n", "200", "--eval-freq", "100", "--seed", "0"])
    return folder


def test_train_command_writes_what_the_zoo_writes(trained):
    run = trained / "logs" / "qa2c" / "CartPole-v1_1"
    assert len(np.load(run / "evaluations.npz")["timesteps"]) == 2
    assert type(QA2C.load(run / "CartPole-v1.zip")) is QA2C
    saved = dict(yaml.load((run / "CartPole-v1" / "config.yml").read_text(), Loader=yaml.UnsafeLoader))
    assert saved == PRESETS["CartPole-v1"]


def test_enjoy_plays_the_trained_agent(trained, rl_zoo):
    printed = rl_zoo("enjoy", *ARGUMENTS, "-f", "logs", "-n", 600, "--no-render", cwd=trained)
    assert "Mean reward" in printed


def test_record_video_makes_a_playable_file(trained, rl_zoo, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    rl_zoo("record_video", *ARGUMENTS, "-f", "logs", "-n", 60, cwd=trained)
    (video,) = trained.rglob("*.mp4")
    assert video.stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the hub's own libraries
def test_agent_goes_to_the_hub_and_comes_back(trained, tmp_path, monkeypatch):
    """RL Zoo's commands, with the hub's client replaced by a folder: all that they do but the transfer."""
    import huggingface_hub
    import huggingface_sb3
    import rl_zoo3

    monkeypatch.chdir(tmp_path)
    hub = tmp_path / "hub" / "qa2c-CartPole-v1"
    uploaded = []

    class Folder:
        def create_repo(self, repo_id, **_):
            return f"https://example.invalid/{repo_id}"

        def snapshot_download(self, **_):
            hub.mkdir(parents=True)

        def upload_folder(self, repo_id, folder_path, **_):
            uploaded.append((repo_id, folder_path))

    def call(command, *arguments):
        monkeypatch.setattr(sys, "argv", sys.argv)
        assert main(["zoo", command, *ARGUMENTS, *map(str, arguments)]) == 0

    monkeypatch.setattr(huggingface_hub, "HfApi", Folder)
    call("push_to_hub", "-f", trained / "logs", "-orga", "someone", "--no-render")
    assert [repo_id for repo_id, _ in uploaded] == ["someone/qa2c-CartPole-v1"]
    card = (hub / "README.md").read_text()
    assert "**QA2C** Agent playing **CartPole-v1**" in card
    assert huggingface_hub.ModelCard(card).data.library_name == "stable-baselines3"

    monkeypatch.setattr(huggingface_sb3, "load_from_hub", lambda _, filename: str(hub / filename))
    # An agent that was trained without VecNormalize has no statistics, which is an HTTP error of the real client
    (hub / "vec_normalize.pkl").touch()
    call("load_from_hub", "-f", "came_back", "-orga", "someone")
    model = rl_zoo3.ALGOS["qa2c"].load(tmp_path / "came_back" / "qa2c" / "CartPole-v1_1" / "CartPole-v1.zip")
    assert type(model) is QA2C


@pytest.mark.parametrize(("installed", "repaired"), [("3.2", True), ("3.3", False)])
def test_hubs_module_is_repaired_in_the_versions_that_are_broken_only(installed, repaired, monkeypatch):
    hub = importlib.import_module("huggingface_sb3.push_to_hub")
    versions = {**commands.zoo.BROKEN_TOGETHER, "sb3-team-hf-integration": installed}
    monkeypatch.setattr(commands.zoo, "version", versions.__getitem__)
    monkeypatch.setattr(hub, "generate_metadata", None, raising=False)
    monkeypatch.delattr(hub, "generate_metadata")
    commands.zoo.repair_push_to_hub()
    assert hasattr(hub, "generate_metadata") == repaired


def test_training_goes_on_from_a_saved_agent(trained, rl_zoo):
    agent = trained / "logs" / "qa2c" / "CartPole-v1_1" / "CartPole-v1.zip"
    printed = rl_zoo("train", *ARGUMENTS, "-n", 200, "--eval-freq", -1, "-i", agent, cwd=trained)
    assert "Loading pretrained agent" in printed


def test_the_trials_of_an_optimisation_keep_no_checkpoints(tmp_path, rl_zoo):
    """They have no folder, so each of them failed."""
    trials = ["-optimize", "--n-trials", 1, "--n-startup-trials", 1, "--n-evaluations", 1, "--no-optim-plots"]
    checkpoints = ["-params", "callback:'sb3_qac.common.callbacks.ExactCheckpointCallback'"]
    printed = rl_zoo("train", *ARGUMENTS, "-n", 100, *trials, *checkpoints, cwd=tmp_path)
    assert "Number of finished trials:  1" in printed and not list(tmp_path.rglob("checkpoints"))


@pytest.mark.slow
def test_a_callback_of_the_users_in_an_optimisation_need_not_be_written_to_a_file(tmp_path, rl_zoo):
    (tmp_path / "config.py").write_text(
        "import threading\nfrom stable_baselines3.common.callbacks import BaseCallback\n\n\n"
        "class Locked(BaseCallback):\n    lock = None\n\n    def __init__(self):\n        super().__init__()\n"
        "        self.lock = threading.Lock()\n\n    def _on_step(self):\n        return True\n\n\n"
        "hyperparams = {'CartPole-v1': dict(n_envs=1, n_timesteps=100, policy='MlpPolicy', callback=Locked())}\n"
    )
    trials = ["-optimize", "--n-trials", 1, "--n-startup-trials", 1, "--n-evaluations", 1, "--no-optim-plots"]
    arguments = ["--algo", "a2c", "--env", "CartPole-v1", "--conf-file", "config.py", "--eval-episodes", 1, "-n", 100]
    assert "Number of finished trials:  1" in rl_zoo("train", *arguments, *trials, cwd=tmp_path)


@pytest.mark.slow
def test_an_optimisation_of_the_sampled_estimator_has_no_correction(tmp_path, rl_zoo):
    trials = ["-optimize", "--n-trials", 3, "--sampler", "random", "--n-evaluations", 1, "--no-optim-plots"]
    sampled = ["-params", "policy_gradient:'sampled'", "n_envs:1"]
    rl_zoo("train", *ARGUMENTS, "-n", 100, "--eval-episodes", 1, "--seed", 0, *trials, *sampled, cwd=tmp_path)
    (report,) = (tmp_path / "logs" / "qa2c").glob("*.csv")
    assert pandas.read_csv(report)[["params_beta", "params_shrinkage"]].to_numpy().tolist() == [[0.0, 0.0]] * 3


CHECKPOINTS = "sb3_qac.common.callbacks.ExactCheckpointCallback"


def write_config(folder, learning_rate):
    entry = {**PRESETS["CartPole-v1"], "learning_rate": learning_rate, "n_timesteps": 200, "callback": CHECKPOINTS}
    (folder / "config.yml").write_text(yaml.dump({"CartPole-v1": entry}))


def train_from_config(rl_zoo, folder):
    return rl_zoo("train", *ARGUMENTS, "--conf-file", "config.yml", "--eval-freq", -1, cwd=folder)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def unfinished(tmp_path, rl_zoo, monkeypatch):
    """Folder of a run that an error stopped; its command read a file that has been edited since."""
    write_config(tmp_path, 1e-3)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(QA2C, "train", lambda self: 1 / 0)
        train_from_config(rl_zoo, tmp_path)
    write_config(tmp_path, 2e-3)
    return tmp_path / "logs" / "qa2c" / "CartPole-v1_1"


def test_a_command_with_other_hyperparameters_starts_a_new_run(unfinished, tmp_path, rl_zoo):
    before = contents(unfinished)
    assert "The hyperparameters or arguments are not those of the unfinished run" in train_from_config(rl_zoo, tmp_path)
    assert contents(unfinished) == before
    assert QA2C.load(unfinished.with_name("CartPole-v1_2") / "CartPole-v1.zip").lr_schedule(1) == 2e-3

    write_config(tmp_path, 1e-3)
    assert "Resuming from step 0" in train_from_config(rl_zoo, tmp_path)
    assert QA2C.load(unfinished / "CartPole-v1.zip").lr_schedule(1) == 1e-3


@pytest.mark.parametrize("other", [["--seed", 1], ["-params", "gamma:0.9"]])
def test_an_unfinished_run_of_another_command_is_mentioned(other, unfinished, tmp_path, rl_zoo):
    write_config(tmp_path, 1e-3)
    printed = rl_zoo("train", *ARGUMENTS, "--conf-file", "config.yml", "--eval-freq", -1, *other, cwd=tmp_path)
    assert re.search(rf"unfinished run in \S*CartPole-v1_1, .*`.*{' '.join(ARGUMENTS)} .*`\. It is not resumed", printed)
    assert (unfinished.with_name("CartPole-v1_2") / "CartPole-v1.zip").exists()


def test_a_command_of_a_file_is_compared_without_evaluating_it(unfinished, tmp_path, rl_zoo):
    """RL Zoo evaluates the values of its command line."""
    path = unfinished / "checkpoints" / "run.json"
    known = json.loads(path.read_text())
    evil = f"gamma:__import__('pathlib').Path({str(tmp_path / 'evil')!r}).touch()"
    path.write_text(json.dumps({**known, "command": [*known["command"], "-params", evil]}))
    assert "It is not resumed" in train_from_config(rl_zoo, tmp_path)
    assert not (tmp_path / "evil").exists()


def test_a_run_does_not_log_to_the_run_of_wandb_of_another(unfinished, tmp_path, rl_zoo, monkeypatch):
    """RL Zoo resumes the run of W&B before it reads the hyperparameters, which have changed here."""
    path = unfinished / "checkpoints" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "wandb": {"id": "run-that-was"}}))
    monkeypatch.setattr("sb3_qac.zoo.resume._resumed_wandb_run", "run-that-was")
    monkeypatch.setattr("sb3_qac.zoo.resume.active_wandb_run", lambda: types.SimpleNamespace(id="run-that-was"))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"--track.* run-that-was of Weights & Biases.*other hyperparameters.*--log-folder"):
        train_from_config(rl_zoo, tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "other",
    [
        "--env Acrobot-v1 -params gamma:0.9 n_steps:4 --log-folder runs --seed 1 -n -1 --verbose 0 -P",
        "--algo ppo -n=-1 --seed=1 --env=Acrobot-v1 -f runs -params n_steps:4 gamma:0.9",
    ],
)
def test_a_command_may_be_spelled_in_another_way(other):
    command = "--env Acrobot-v1 -params gamma:0.9 n_steps:4 --log-folder runs --seed 1 -n -1"
    found = _arguments_of(["train.py", *command.split()])
    assert found["env"] == "Acrobot-v1" and found["-params"] == ["gamma:0.9", "n_steps:4"] and found["-n"] == ["-1"]
    assert _arguments_of(["train.py", *other.split()]) == found
    assert _arguments_of(["train.py", *command.replace("--seed 1", "--seed 2").split()]) != found


def run_from_script(manager_class=ExperimentManager, **arguments):
    """:return: name of the folder of a training without a command line, which saves no agent and so stays unfinished"""
    arguments = dict(n_timesteps=80, seed=0, log_interval=-1, verbose=0) | arguments
    manager = manager_class(argparse.Namespace(), "qa2c", "FrozenLake-v1", "logs", **arguments)
    model, _ = manager.setup_experiment()
    manager.learn(model)
    model.env.close()
    return Path(manager.save_path).name


@pytest.mark.slow
def test_the_seed_and_the_trained_agent_tell_the_runs_of_a_script_apart(tmp_path, monkeypatch):
    """They have the same command line."""
    monkeypatch.chdir(tmp_path)
    hyperparams = dict(callback="sb3_qac.resume.ExactCheckpointCallback")
    QA2C("MlpPolicy", "FrozenLake-v1", policy_kwargs=dict(optimizer_class=th.optim.RMSprop)).save("one.zip")
    shutil.copy("one.zip", "two.zip")
    settings = [dict(seed=0), dict(seed=1), dict(trained_agent="one.zip"), dict(trained_agent="two.zip")]
    # The second time each run is found again: without an agent of its own it is unfinished
    folders = [run_from_script(hyperparams=hyperparams, **each) for each in 2 * settings]
    assert folders == 2 * [f"FrozenLake-v1_{number}" for number in (1, 2, 3, 4)]


class OwnManager(ExperimentManager):
    """It reads hyperparameters in its own way, not with the method of its base class."""

    def read_hyperparameters(self):
        hyperparams = {**PRESETS["FrozenLake-v1"], "callback": "sb3_qac.resume.ExactCheckpointCallback"}
        return hyperparams, hyperparams


def test_a_manager_that_reads_hyperparameters_in_its_own_way_resumes_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [run_from_script(OwnManager) for _ in range(2)] == 2 * ["FrozenLake-v1_1"]


def test_hyperparameters_from_python_with_a_callback_in_them_are_recognised(tmp_path, rl_zoo, monkeypatch):
    write_config(tmp_path, 1e-3)
    (tmp_path / "config.py").write_text(
        f"import pathlib, yaml\nfrom {CHECKPOINTS.rpartition('.')[0]} import ExactCheckpointCallback\n"
        "hyperparams = yaml.safe_load(pathlib.Path('config.yml').read_text())\n"
        "hyperparams['CartPole-v1'].update(callback=ExactCheckpointCallback(), normalize={'norm_reward': False}, gamma=0.9)\n"
    )
    command = ("train", *ARGUMENTS, "--conf-file", "config.py", "--eval-freq", -1)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(QA2C, "train", lambda self: 1 / 0)
        rl_zoo(*command, cwd=tmp_path)
    assert "Resuming from step 0" in rl_zoo(*command, cwd=tmp_path)
    # RL Zoo reads the callback from the run's config.yml
    rl_zoo("enjoy", *ARGUMENTS, "-f", "logs", "-n", 10, "--no-render", cwd=tmp_path)


class Named(ExactCheckpointCallback):
    def __init__(self, folder, name):
        super().__init__(folder)
        self._name, self.notify = name, print


def test_the_callback_is_written_as_yaml_without_enumerations():
    """YAML cannot write their members on Python 3.10."""
    assert "signal.Signals" not in yaml.dump(ExactCheckpointCallback())


def test_callbacks_come_back_from_yaml_and_from_copies_with_their_arguments():
    for copied in (lambda x: yaml.unsafe_load(yaml.dump(x)), copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        callback = copied(ExactCheckpointCallback("runs/a", save_freq=50, keep=2, verbose=0, save_minutes=1))
        assert type(callback) is ExactCheckpointCallback and callback.folder == Path("runs/a")
        assert (callback.save_freq, callback.keep, callback.verbose, callback.save_minutes) == (50, 2, 0, 1)
        named = copied(Named("runs/b", "mine"))
        assert (type(named), named.folder, named._name, named.notify, named.keep) == (Named, Path("runs/b"), "mine", print, 3)
        assert type(copied(CurvesCallback())) is CurvesCallback


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-100])])
def test_a_run_that_was_killed_before_its_agent_was_saved_is_unfinished(damage, tmp_path, rl_zoo):
    write_config(tmp_path, 1e-3)
    train_from_config(rl_zoo, tmp_path)
    agent = tmp_path / "logs" / "qa2c" / "CartPole-v1_1" / "CartPole-v1.zip"
    trained = QA2C.load(agent).get_parameters()["policy"]
    damage(agent)
    assert "Resuming from step 200" in train_from_config(rl_zoo, tmp_path)
    saved = QA2C.load(agent)
    assert saved.num_timesteps == 200 and all(map(th.equal, saved.policy.state_dict().values(), trained.values()))
    assert "CartPole-v1_2" in train_from_config(rl_zoo, tmp_path)


def test_the_agent_of_an_environment_with_a_point_in_its_name_is_found(tmp_path, rl_zoo, monkeypatch):
    """SB3 takes what follows the point for the suffix of the file."""
    (tmp_path / "module_of_my_own.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('My.Own-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=500)\n"
    )
    algo, entry = "a2c", {"policy": "MlpPolicy", "n_timesteps": 200, "callback": CHECKPOINTS}
    (tmp_path / "config.yml").write_text(yaml.dump({"My.Own-v0": entry}))
    arguments = ["--algo", algo, "--env", "My.Own-v0", "--gym-packages", "module_of_my_own"]
    train = ("train", *arguments, "--conf-file", "config.yml", "--eval-freq", -1)
    monkeypatch.syspath_prepend(tmp_path)
    assert "My.Own-v0_1\n" in rl_zoo(*train, cwd=tmp_path)
    assert "My.Own-v0_2\n" in rl_zoo(*train, cwd=tmp_path)
    assert (tmp_path / "logs" / algo / "My.Own-v0_2" / "My.Own-v0.zip").is_file()
    assert "Mean reward" in rl_zoo("enjoy", *arguments, "-f", "logs", "-n", 600, "--no-render", cwd=tmp_path)


@pytest.mark.slow
def test_train_without_the_hook(tmp_path):
    train = ["train", *ARGUMENTS, "-n", 100, "--eval-freq", -1]
    assert "Saving to" in python("-m", "sb3_qac", "zoo", *train, cwd=tmp_path, SB3_QAC_ZOO_HOOK="0")


def test_train_without_the_hook_goes_on_with_its_run_of_wandb(tmp_path, monkeypatch):
    train = [*ARGUMENTS, "--track", "--log-folder", str(tmp_path)]
    run = tmp_path / "qa2c" / "CartPole-v1_1" / "checkpoints" / "run.json"
    run.parent.mkdir(parents=True)
    run.write_text(json.dumps({"command": ["train.py", *train], "finished": False, "wandb": {"id": "run-that-was"}}))
    for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["sb3_qac", "zoo", "train", *train])
    started = []
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: started.append((name, os.environ.get("WANDB_RUN_ID"))))
    assert main(["zoo", "train", *train]) == 0
    assert started == [("rl_zoo3.train", "run-that-was")]

    # As RL Zoo's script `rl_zoo3` starts it, with the hook
    monkeypatch.delenv("WANDB_RUN_ID")
    monkeypatch.setattr(sys, "argv", ["rl_zoo3", "train", *train])
    zoo.register()
    assert os.environ["WANDB_RUN_ID"] == "run-that-was"


@pytest.mark.parametrize("arguments", [["-f"], ["--track=all"], ["--verbose"]])
def test_arguments_of_other_programs_are_left_alone(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["other.py", *arguments])
    resume_wandb(importlib.import_module("rl_zoo3.exp_manager"))
    run = tmp_path / "CartPole-v1_1" / "checkpoints" / "run.json"
    run.parent.mkdir(parents=True)
    run.write_text(json.dumps({"command": ["other.py"], "finished": False, "wandb": None}))
    assert unfinished_run(tmp_path, "CartPole-v1", sys.argv) is None


def test_stock_a2c_takes_the_settings_it_is_compared_with(tmp_path, rl_zoo):
    arguments = ["--algo", "a2c", "--env", "PongNoFrameskip-v4", "--conf-file", zoo.presets("a2c"), "-params", "n_envs:2"]
    printed = rl_zoo("train", *arguments, "-n", 80, "--eval-freq", -1, "--seed", 0, cwd=tmp_path)
    assert "Saving to logs/a2c/PongNoFrameskip-v4_1" in printed


@pytest.mark.slow
def test_doctor_finds_a_healthy_installation(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [finding for finding in findings if not finding["ok"]] == []
    found = {finding["what"]: finding["found"] for finding in findings}
    assert all(algo in found["RL Zoo"] for algo in zoo.ALGORITHMS)


@pytest.mark.slow
def test_doctor_says_why_the_hook_could_not_register(tmp_path, monkeypatch, capsys):
    (tmp_path / "rl_zoo3").mkdir()
    for name in ("__init__", "utils", "hyperparams_opt", "exp_manager"):
        (tmp_path / "rl_zoo3" / f"{name}.py").write_text("")
    (tmp_path / "rl_zoo3" / "exp_manager.py").write_text("import rl_zoo3.utils")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 1
    fix = re.search(r"^\[!!\] RL Zoo: .*\n     -> (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
    assert "could not register" in fix and "has no attribute 'ALGOS'" in fix


@pytest.fixture
def quick_doctor(monkeypatch):
    """Without the process that imports RL Zoo."""
    monkeypatch.setattr(doctor, "_zoo_command", lambda: doctor.Finding("RL Zoo", True, ""))


def test_doctor_names_versions_that_were_not_tested(quick_doctor, monkeypatch, capsys):
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: {"rl_zoo3": "2.4.0", "torch": None}.get(name, version(name)))
    main(["doctor"])
    line, fix = re.search(r"^\[!!\] packages: (.*)\n     -> (.*)$", capsys.readouterr().out, re.MULTILINE).groups()
    assert "rl_zoo3 2.4.0 (needed: <2.10,>=2.9.2)" in line and "torch missing (needed: <3,>=2.13)" in line
    assert line.count("needed") == 2
    assert "rl_zoo3<2.10,>=2.9.2" in fix and "torch<3,>=2.13" in fix


@pytest.mark.parametrize(
    ("builds", "finding"),
    [
        (["opencv-contrib-python"], "[ok] OpenCV: opencv-contrib-python\n"),
        (["opencv-python", "opencv-python-headless"], "[!!] OpenCV: opencv-python and opencv-python-headless\n"),
    ],
)
def test_doctor_knows_all_builds_of_opencv(builds, finding, quick_doctor, monkeypatch, capsys):
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: name in builds if name.startswith("opencv") else version(name))
    main(["doctor"])
    assert finding in capsys.readouterr().out


def test_doctor_says_that_the_hook_is_switched_off(quick_doctor, monkeypatch, capsys):
    monkeypatch.setenv("SB3_QAC_ZOO_HOOK", "0")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "[!!] hook: off" in printed
    assert "-> `unset SB3_QAC_ZOO_HOOK`, or run RL Zoo as `python -m sb3_qac zoo train ...`." in printed


def test_doctor_says_that_the_hook_is_missing(quick_doctor, monkeypatch, capsys):
    monkeypatch.setattr("sb3_qac.doctor.HOOK", "no_such_module")
    assert main(["doctor"]) == 1
    assert "no_such_module.py is not installed" in capsys.readouterr().out


def test_presets_command_prints_the_file_of_the_comparison(capsys):
    assert main(["presets", "a2c"]) == 0
    assert "PongNoFrameskip-v4" in yaml.safe_load(Path(capsys.readouterr().out.strip()).read_text())


def test_presets_command_knows_every_algorithm():
    assert commands.presets.PRESETS == (*zoo.ALGORITHMS, "a2c", "ppo")


def test_registering_twice_is_harmless():
    import rl_zoo3
    from rl_zoo3.exp_manager import ExperimentManager

    zoo.register()
    once = ExperimentManager.__init__
    zoo.register()
    assert ExperimentManager.__init__ is once
    assert rl_zoo3.ALGOS["qa2c"] is QA2C


def test_a_name_that_another_algorithm_has_is_left_to_it_with_a_warning():
    modules = fake_zoo()
    utils, hyperparams_opt = modules["rl_zoo3.utils"], modules["rl_zoo3.hyperparams_opt"]
    utils.ALGOS["reinforce"] = dict
    hyperparams_opt.HYPERPARAMS_SAMPLER["reinforce"] = sampler = object()
    with pytest.warns(UserWarning, match="knows 'reinforce' already, as <class 'dict'>"):
        zoo.register_in(utils)
    zoo.register_in(hyperparams_opt)
    assert utils.ALGOS == {**zoo.ALGORITHMS, "reinforce": dict}
    assert hyperparams_opt.HYPERPARAMS_SAMPLER["reinforce"] is sampler
    assert set(hyperparams_opt.HYPERPARAMS_SAMPLER) == set(search_space.SAMPLERS)


def test_a_name_that_is_taken_is_no_error_where_warnings_are_errors(capsys):
    modules = fake_zoo()
    modules["rl_zoo3.utils"].ALGOS["reinforce"] = dict
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.register_in(modules["rl_zoo3.utils"])
    assert "knows 'reinforce' already" in capsys.readouterr().err


def test_an_algorithm_of_the_user_s_with_our_name_gets_no_search_space_of_ours(monkeypatch):
    zoo.register()
    import rl_zoo3

    monkeypatch.setitem(rl_zoo3.ALGOS, "reinforce", dict)
    hyperparams_opt = fake_zoo()["rl_zoo3.hyperparams_opt"]
    zoo.register_in(hyperparams_opt)
    assert set(hyperparams_opt.HYPERPARAMS_SAMPLER) == set(search_space.SAMPLERS) - {"reinforce"}


def test_an_algorithm_of_the_user_s_with_our_name_keeps_its_own_presets(monkeypatch):
    zoo.register()
    import rl_zoo3
    from rl_zoo3.exp_manager import ExperimentManager

    def config():
        return ExperimentManager(None, "reinforce", "CartPole-v1", "logs").config

    assert config() == str(zoo.presets("reinforce"))
    monkeypatch.setitem(rl_zoo3.ALGOS, "reinforce", dict)
    assert config() != str(zoo.presets("reinforce"))


def fake_zoo():
    """:return: RL Zoo's three modules, with what registering needs and no more, by name"""

    class ExperimentManager:
        def __init__(self, args, algo, config=None): ...

        def read_hyperparameters(self): ...

        def create_log_folder(self): ...

        def save_trained_model(self, model): ...

    modules = {name: types.ModuleType(name) for name in REGISTRATIONS}
    modules["rl_zoo3.utils"].ALGOS = modules["rl_zoo3.exp_manager"].ALGOS = {}
    modules["rl_zoo3.hyperparams_opt"].HYPERPARAMS_SAMPLER = {}
    modules["rl_zoo3.hyperparams_opt"].HYPERPARAMS_CONVERTER = {}
    modules["rl_zoo3.exp_manager"].ExperimentManager = ExperimentManager
    return modules


def entries(algo):
    """:return: environments with settings of their own, each with its number of steps"""
    presets = yaml.safe_load(zoo.presets(algo).read_text())
    return [
        (algo, name, entry["n_timesteps"]) for name, entry in presets.items() if name not in ("atari", "minatar", "default")
    ]


# With one environment the rollout is smaller than the minibatch of QPPO and PPO, and REINFORCE has no number of steps
@pytest.mark.filterwarnings(
    "ignore:`batch_size` is", "ignore:You have specified a mini-batch size", "ignore:`learn` ends without an update"
)
@pytest.mark.parametrize(
    ("algo", "env_id", "n_timesteps"), [entry for algo in (*zoo.ALGORITHMS, "a2c", "ppo") for entry in entries(algo)]
)
def test_every_preset_makes_a_model(algo, env_id, n_timesteps, tmp_path):
    """RL Zoo's own manager reads the entry, makes the environments and the model."""
    from rl_zoo3.exp_manager import ExperimentManager

    zoo.register()
    few, config = dict(n_envs=1), str(zoo.presets(algo))
    manager = ExperimentManager(
        types.SimpleNamespace(), algo, env_id, str(tmp_path), eval_freq=-1, hyperparams=few, verbose=0, config=config
    )
    model, _ = manager.setup_experiment()
    model.learn(model.n_steps)
    assert manager.n_timesteps == n_timesteps
    model.env.close()


@pytest.mark.parametrize(
    ("algo", "space", "given", "policy"),
    [
        ("qa2c", "vectors", {}, "MlpPolicy"),
        ("qppo", "dictionaries", {}, "MultiInputPolicy"),
        ("reinforce", "images", {}, "CnnPolicy"),
        ("pqn", "vectors", {}, "MlpPolicy"),
        ("qa2c", "small images", {}, "MlpPolicy"),
        # As RL Zoo has it
        ("a2c", "images", {}, "MlpPolicy"),
        # What is asked for stays
        ("qa2c", "images", {"policy": "MlpPolicy"}, "MlpPolicy"),
        ("qa2c", "images", {"policy_kwargs": "dict(features_extractor_class=SharedMlp, net_arch=[])"}, "MlpPolicy"),
        ("qppo", "images", {"normalize": True}, "MlpPolicy"),
        ("qppo", "dictionaries", {"env_wrapper": "gymnasium.wrappers.FlattenObservation"}, "MlpPolicy"),
        (
            "qa2c",
            "dictionaries",
            {"vec_env_wrapper": {"stable_baselines3.common.vec_env.VecExtractDictObs": {"key": "a"}}},
            "MlpPolicy",
        ),
    ],
)
def test_the_policy_of_the_default_preset_follows_from_the_observations(
    algo, space, given, policy, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(gym.registry, "Mine-v0", EnvSpec("Mine-v0", ObservationsOf, kwargs={"space": space}))
    manager = ExperimentManager(
        argparse.Namespace(), algo, "Mine-v0", str(tmp_path), eval_freq=-1, hyperparams=given, verbose=0, seed=0
    )
    hyperparams, saved = manager.read_hyperparameters()
    assert hyperparams["policy"] == saved["policy"] == policy
    line = f"{algo} has {policy} on Mine-v0 instead of the MlpPolicy of the preset `default`, because its observations are"
    assert (line in capsys.readouterr().out) == (policy != "MlpPolicy")
    if algo != "a2c":
        model, _ = manager.setup_experiment()
        model.env.close()
        assert model.policy_class is model.policy_aliases[policy]


def test_the_policy_of_an_entry_for_an_environment_stays(tmp_path, monkeypatch):
    (tmp_path / "mine.yml").write_text("Mine-v0: {n_timesteps: 100, policy: MlpPolicy}")
    monkeypatch.setitem(gym.registry, "Mine-v0", EnvSpec("Mine-v0", ObservationsOf, kwargs={"space": "images"}))
    config = str(tmp_path / "mine.yml")
    manager = ExperimentManager(argparse.Namespace(), "qa2c", "Mine-v0", str(tmp_path), config=config, verbose=0)
    assert manager.read_hyperparameters()[0]["policy"] == "MlpPolicy"


@pytest.mark.filterwarnings("ignore:`batch_size` is")
@pytest.mark.parametrize("algo", search_space.SAMPLERS)
def test_samples_of_a_search_space_are_arguments_of_the_algorithm(algo):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(10):
        sampled = search_space.SAMPLERS[algo](study.ask(), n_actions=0, n_envs=8, additional_args={})
        zoo.ALGORITHMS[algo]("MlpPolicy", "CartPole-v1", **sampled)


def as_sampled(preset, names):
    """:return: the values under these names of a search space that stand for a preset's"""
    found = {}
    for name in names:
        argument = re.sub(r"^one_minus_|_pow$|_schedule$", "", name)
        if argument in preset:
            kind, _, number = str(preset[argument]).rpartition("_")
            if name.endswith("_schedule"):
                found[name] = "linear" if kind == "lin" else "constant"
            elif name.endswith("_pow"):
                found[name] = int(np.log2(preset[argument]))
            elif name.startswith("one_minus_"):
                found[name] = 1 - preset[argument]
            else:
                found[name] = preset[argument] if kind != "lin" else float(number)
    return found


SEARCHED = [("qa2c", "default"), ("reinforce", "default")]
SEARCHED += [(algo, entry) for algo in ("qppo", "pqn") for entry in yaml.safe_load(zoo.presets(algo).read_text())]


@pytest.mark.filterwarnings("error:Fixed parameter")
@pytest.mark.parametrize(("algo", "entry"), SEARCHED)
def test_search_space_contains_the_preset(algo, entry):
    preset = yaml.safe_load(zoo.presets(algo).read_text())[entry]
    study, sample = optuna.create_study(), search_space.SAMPLERS[algo]
    trial = study.ask()
    sample(trial, n_actions=0, n_envs=8, additional_args={})
    study.enqueue_trial(as_sampled(preset, trial.params))
    sampled = sample(study.ask(), n_actions=0, n_envs=8, additional_args={})
    tried = sampled.keys() & preset.keys()
    assert {"learning_rate", "gamma"} & tried
    for name in tried:
        if isinstance(preset[name], str):
            assert float(sampled[name].removeprefix("lin_")) == float(preset[name].removeprefix("lin_")), name
        else:
            assert sampled[name] == pytest.approx(preset[name]), name


def test_search_of_qppo_leaves_out_what_the_sampled_estimator_does_not_use():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.set_user_attr("policy_gradient", "sampled")
    drawn = [search_space.sample_qppo_params(study.ask(), n_actions=0, n_envs=8, additional_args={}) for _ in range(20)]
    assert {(each["beta"], each["shrinkage"]) for each in drawn} == {(1.0, 0.1)}


@pytest.mark.parametrize("algo", ["qppo", "pqn"])
def test_there_are_presets_for_everything_that_qa2c_has(algo):
    """Also for the tasks without settings of their own: all Atari games, and the default."""
    assert set(yaml.safe_load(zoo.presets(algo).read_text())) == set(PRESETS)


def test_presets_are_there_for_all_environments_that_the_readme_names():
    assert {"PongNoFrameskip-v4", "SpaceInvadersNoFrameskip-v4", "CartPole-v1", "Acrobot-v1", "LunarLander-v3"} <= set(PRESETS)
    assert {"MountainCar-v0", "FrozenLake-v1", "default", "atari"} <= set(PRESETS)
    assert PRESETS["PongNoFrameskip-v4"]["n_timesteps"] == 15_000_000


@pytest.mark.slow
def test_native_environments_are_one_key_away(tmp_path, rl_zoo):
    """For training and for evaluation."""
    native = "vec_env_wrapper:'sb3_qac.common.env_util.to_ale_vec_env'"
    pong = ["--algo", "qa2c", "--env", "PongNoFrameskip-v4"]
    limit = "env_kwargs:dict(max_num_frames_per_episode=400)"
    train = [*pong, "-n", 40, "--eval-freq", 40, "--eval-episodes", 1, "-params", native, limit, "n_envs:2", "--seed", 0]
    rl_zoo("train", *train, cwd=tmp_path)
    run = tmp_path / "logs" / "qa2c" / "PongNoFrameskip-v4_1"
    assert -21 <= np.load(run / "evaluations.npz")["results"][0, 0] <= 0
    assert len(list(run.glob("*.monitor.csv"))) == 2


def test_presets_without_a_name_are_all_files_there_are(capsys):
    assert main(["presets"]) == 0
    assert sorted(map(Path, capsys.readouterr().out.splitlines())) == sorted(zoo.presets("qa2c").parent.glob("*.yml"))
