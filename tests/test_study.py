"""A study trains its grid, each run once, however often it is started."""

import contextlib
import copy
import errno
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import rl_zoo3.exp_manager
import torch as th
import yaml
from filelock import FileLock
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec
from rich.console import Console
from rl_zoo3.exp_manager import EnvironmentName
from rl_zoo3.utils import ALGOS
from stable_baselines3 import A2C
from stable_baselines3.common.atari_wrappers import EpisodicLifeEnv
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import is_wrapped, make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

import sb3_qac
from benchmarks.pack import command_of
from sb3_qac.__main__ import main, make_parser
from sb3_qac.commands.study import grid_of
from sb3_qac.common.buffers import DeviceRolloutBuffer
from sb3_qac.common.curves import CurvesCallback
from sb3_qac.common.files import make_folder, read_json, write_atomically
from sb3_qac.common.vec_env import AleVecEnv
from sb3_qac.common.wrappers import EpisodeReplay
from sb3_qac.resume.checkpoints import checkpoints_in, load_checkpoint
from sb3_qac.study.agents import final_agent
from sb3_qac.study.callbacks import EvaluateFromReturn, StatusCallback
from sb3_qac.study.catalogue import STUDIES, TASKS, field_name
from sb3_qac.study.grid import make_grid, notes, run_study
from sb3_qac.study.loading import load_run, load_study, read_config
from sb3_qac.study.manager import StudyManager, config_of, has_visible_state, model_of
from sb3_qac.study.progress import status_table, summary
from sb3_qac.study.report import warnings_of
from sb3_qac.study.run import Run, env_dirname, read_run
from sb3_qac.study.snapshots import SnapshotCallback
from sb3_qac.study.train import commits_of, provenance, train_run
from sb3_qac.zoo import presets
from tests.envs import Unrepeatable

SMALL = dict(n_timesteps=2000, eval_freq=800, n_eval_episodes=3, wandb="disabled", device="cpu")


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def test_the_grid_is_every_algorithm_with_every_seed(tmp_path):
    runs = make_grid("pong", ["a2c", "task1", "task2"], [0, 100], tmp_path)
    assert [run.name for run in runs] == [f"{group}_seed-{seed}" for group in ("a2c", "task1", "task2") for seed in (0, 100)]
    assert {run.env_id for run in runs} == {"PongNoFrameskip-v4"}
    by_group = {run.group: run for run in runs}
    assert {name: (run.algo, run.hyperparams) for name, run in by_group.items()} == {
        "a2c": ("a2c", {}),
        # The pure estimator, whatever a preset says
        "task1": ("qa2c", {"baseline": False, "beta": 0.0}),
        "task2": ("qa2c", {"baseline": True, "beta": 0.0}),
    }


@pytest.mark.parametrize(("idle", "n_jobs", "expected"), [(2, 1, 2), (16, 1, 2), (1, 1, 1), (2, 2, 1), (4, 2, 2)])
def test_threads_follow_the_machine_and_stay_those_of_a_run(idle, n_jobs, expected, tmp_path, monkeypatch):
    """With another number of threads a run would not be resumed exactly."""
    monkeypatch.setattr("sb3_qac.commands.study.idle_cores", lambda: idle)
    command = ["study", "cartpole", "--algos", "qa2c", "--seeds", "0", "1", "--threads", "auto", "--jobs", str(n_jobs)]
    runs = grid_of(make_parser().parse_args(command), tmp_path)
    assert [run.n_threads for run in runs] == [expected, expected]
    begun = Path(runs[0].folder, "run.json")
    begun.parent.mkdir(parents=True)
    begun.write_text(json.dumps({"n_threads": 3}))
    assert [run.n_threads for run in grid_of(make_parser().parse_args(command), tmp_path)] == [3, expected]


def test_a_run_has_the_name_that_it_is_asked_for_by(tmp_path):
    names = {"all-action": "task1", "all-action-baseline": "task2", "beta-loo": "beta1"}
    new, old = (make_grid("pong", algos, [0], tmp_path) for algos in (list(names), list(names.values())))
    for runs, groups in ((new, list(names)), (old, list(names.values()))):
        assert [run.group for run in runs] == groups
        assert [Path(run.folder).name for run in runs] == [run.name for run in runs] == [f"{group}_seed-0" for group in groups]
    # Otherwise they are the same
    assert [(run.algo, run.hyperparams) for run in new] == [(run.algo, run.hyperparams) for run in old]
    assert [field_name(run.name) for run in old] == [run.name for run in new]
    assert {Path(run.folder).name for run in make_grid("pong", STUDIES["pong"].algos, [0], tmp_path)} == {
        "a2c_seed-0",
        "all-action_seed-0",
        "all-action-baseline_seed-0",
    }


@pytest.mark.parametrize(("first", "second"), [("task1", "all-action"), ("all-action", "task1")])
def test_a_run_that_is_there_by_its_other_name_is_not_trained_again(first, second, tmp_path):
    """A report would refuse to count it twice."""
    path = Path(make_grid("cartpole", [first], [0], tmp_path)[0].folder, "run.json")
    path.parent.mkdir()
    path.write_text("{}")
    with pytest.raises(ValueError, match=rf"{first}_seed-0 is the run of {second} with this seed.* Give `--algos {first}`"):
        run_study(make_grid("cartpole", [second], [0], tmp_path))


STUDY_FILE = """
environments: [CartPole-v1, Acrobot-v1]
groups:
  a2c:
  qppo-wide: {algo: qppo, hyperparams: {n_envs: 4, policy_kwargs: "dict(net_arch=[8])"}}
seeds: [3]
steps: 1000
stop_return: 400
eval_episodes: 2
deterministic: true
wandb: disabled
"""


def test_a_study_can_be_a_file_of_the_users(tmp_path):
    (path := tmp_path / "mine.yml").write_text(STUDY_FILE)

    def runs_of(*options):
        return grid_of(make_parser().parse_args(["study", str(path), *options]), tmp_path)

    runs = runs_of()
    assert [(run.env_id, run.group, run.algo) for run in runs] == [
        (env_id, group, algo)
        for env_id in ("CartPole-v1", "Acrobot-v1")
        for group, algo in (("a2c", "a2c"), ("qppo-wide", "qppo"))
    ]
    assert runs[1].hyperparams == {"n_envs": 4, "policy_kwargs": "dict(net_arch=[8])"} and runs[1].name == "qppo-wide_seed-3"
    assert {(run.seed, run.n_timesteps, run.stop_return, run.n_eval_episodes) for run in runs} == {(3, 1000, 400, 2)}
    assert all(run.deterministic and run.wandb == "disabled" and run.eval_freq == 250 for run in runs)
    # Options replace what the file says
    run, _ = runs_of("--algos", "qppo-wide", "--steps", "2000", "--seeds", "4", "--wandb", "offline")
    assert (run.group, run.n_timesteps, run.seed, run.wandb) == ("qppo-wide", 2000, 4, "offline")
    with pytest.raises(ValueError, match="`-params` has n_envs, which the name qppo-wide already sets"):
        runs_of("-params", "n_envs:2")
    # Its name is not that of an algorithm, so no command trains it alone
    assert command_of(asdict(run)) == ""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds: [3]", "seed: 3", "the file has 'seed', but may have environments, groups, seeds, .* Correct or remove it"),
        ("seeds: [3]", "seeds: 3", r"`seeds` must be a list of seeds, such as \[0, 1\], but 3"),
        ("steps: 1000", "steps: 1e3", "`steps` must be an integer, at least 1, but '1e3'"),
        ("disabled", "of", "`wandb` must be 'offline', 'online' or 'disabled', but 'of'"),
        ("environments: [CartPole-v1, Acrobot-v1]", "", "`environments` must be a list"),
        ("environments: [CartPole-v1, Acrobot-v1]", "environments: []", "`environments` must be a list"),
        ("environments: [CartPole-v1", "environments: [3", "`environments` must be names, but 3"),
        ("qppo-wide", "../qppo", "name of a group must be a text without slashes, but '../qppo'"),
        ("qppo-wide", "7", "name of a group must be a text without slashes, but 7"),
        ("n_envs: 4", "gamma: 2020-01-01", "Object of type date is not JSON serializable"),
        ("qppo-wide", "task1", "settings of its own for task1, a name that has others here. Choose another one"),
        ("algo: qppo", "algorithm: qppo", "qppo-wide has 'algorithm', but may have algo, hyperparams"),
        ("algo: qppo", "algo: qpppo", "`algo` of qppo-wide must be one of .*, but 'qpppo' was given"),
        ("qppo-wide", "qppo", "qppo has settings of its own, but it is the name of an algorithm. Choose another one"),
        ("qppo-wide", "qppo-no-kl", "settings of its own for qppo-no-kl, a name that has others here. Choose another one"),
        ("  a2c:", "  a2cc:", "There is no algorithm a2cc. Did you mean a2c"),
        ("CartPole-v1", "CartPol-v1", "Did you mean"),
        (STUDY_FILE, "- a", "the file must be a mapping of environments, groups"),
        (STUDY_FILE, "a: [", "is no study that can be run: while parsing"),
        (STUDY_FILE, None, "No such file"),
    ],
)
def test_a_study_file_that_cannot_be_run_is_refused_with_the_reason(old, new, message, tmp_path):
    if new is not None:
        (tmp_path / "mine.yml").write_text(STUDY_FILE.replace(old, new))
    with pytest.raises(SystemExit, match=f"^study: .*{message}"):
        main(["study", str(tmp_path / "mine.yml"), "--output", str(tmp_path)])


def test_names_of_studies_are_different():
    names = [name for study in STUDIES.values() for name in study.tasks]
    assert len(names) == len(set(names))
    assert set(TASKS) == set(names) and not set(names) & set(ALGOS)


def test_settings_are_those_of_the_comparison_where_there_are_some():
    for env_id in ("PongNoFrameskip-v4", "BreakoutNoFrameskip-v4", "MinAtar/Seaquest-v1"):
        assert config_of("a2c", env_id) == str(presets("a2c"))
    # RL Zoo's elsewhere
    assert config_of("a2c", "CartPole-v1") is None and config_of("ppo", "PongNoFrameskip-v4") is None
    assert config_of("qa2c", "CartPole-v1") == str(presets("qa2c"))
    # The peers' network on MinAtar is that of ours
    assert config_of("ppo", "MinAtar/Seaquest-v1") == str(presets("ppo")) and config_of("ppo", "CartPole-v1") is None
    assert config_of("pqn", "Acrobot-v1") == str(presets("pqn"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("pong", "spaceinvaders", "ablation") else [])
        for name in STUDIES
    ],
)
def test_every_algorithm_of_a_study_can_be_made_and_is_trained_for_as_long(name, tmp_path):
    pytest.importorskip("minatar")
    settings = dict(n_timesteps=STUDIES[name].steps, n_eval_episodes=1, wandb="disabled", device="cpu")
    env_id, *_ = STUDIES[name].env_ids
    steps = set()
    for run in make_grid(name, STUDIES[name].algos, [0], tmp_path, **settings):
        if run.env_id != env_id:
            continue
        if "NoFrameskip" in run.env_id:
            # Fewer of them: each of these games takes a fifth of a second to be loaded
            run = replace(run, hyperparams={**run.hyperparams, "n_envs": 2})
        model, _ = (manager := StudyManager(run)).setup_experiment()
        assert type(model) is ALGOS[run.algo]
        steps.add(manager.n_timesteps)
        for env in manager.envs:
            env.close()
    assert len(steps) == 1


def test_a_short_name_can_stand_for_several_environments(tmp_path):
    runs = make_grid("classic", ["task1"], [0, 1], tmp_path)
    assert [Path(run.folder).relative_to(tmp_path).as_posix() for run in runs] == [
        f"{env_id}/task1_seed-{seed}" for env_id in ("CartPole-v1", "Acrobot-v1") for seed in (0, 1)
    ]
    folder = Path(make_grid("MinAtar/Breakout-v1", ["task1"], [0], tmp_path)[0].folder)
    assert folder == tmp_path / "task1_seed-0"


def test_a_long_table_shows_what_is_under_way(tmp_path):
    runs = make_grid("classic", ["task1"], range(30), tmp_path)
    for run, finished in zip(runs[:3], (True, True, False), strict=True):
        status = {"steps": 1, "total": 3, "steps_per_second": 1.0, "finished": finished, "last_evaluation": None}
        Path(run.folder).mkdir(parents=True)
        Path(run.folder, "status.json").write_text(json.dumps(status))
    table = status_table(runs, {})
    assert list(table.columns[0].cells) == ["CartPole-v1 all-action_seed-2"] and table.caption == "2 of 60 finished"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Pogn-v4", ["task1"], [0]), "Pogn.*Short names are ablation"),
        (
            ("pong", ["task3"], [0]),
            "no algorithm task3. Did you mean task1 or task2.* There are .* all-action, all-action-baseline, beta-loo, .*a2c",
        ),
        (("pong", ["ac2"], [0]), "no algorithm ac2. Did you mean a2c or sac.* There are"),
        (("pong", ["task1"], [0], "missing.yml"), "no file missing.yml"),
    ],
)
def test_what_there_is_not_is_refused(arguments, message, tmp_path):
    env_id, groups, seeds, *config = arguments
    with pytest.raises(ValueError, match=message):
        make_grid(env_id, groups, seeds, tmp_path, *config)


@pytest.mark.parametrize("name", ["eval_freq", "n_eval_episodes", "n_threads"])
def test_numbers_below_one_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=f"`{name}`"):
        make_grid("pong", ["task1"], [0], tmp_path, **{name: 0})


def test_a_return_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`stop_return`.*nan"):
        make_grid("pong", ["task1"], [0], tmp_path, stop_return=float("nan"))
    with pytest.raises(ValueError, match=r"`eval_from`.*nan"):
        make_grid("pong", ["task1"], [0], tmp_path, eval_from=float("nan"))
    assert make_grid("pong", ["task1"], [0], tmp_path, stop_return=-20.5, eval_from=-20.5)


def test_no_time_is_left_in_the_last_rollout(tmp_path):
    """It may be longer than the training."""
    (run,) = make_grid("cartpole", ["ppo"], [0], tmp_path)
    status = {"steps": 2000, "total": 1000, "steps_per_second": 10.0, "finished": False, "last_evaluation": None}
    Path(run.folder).mkdir(parents=True)
    Path(run.folder, "status.json").write_text(json.dumps(status))
    (left,) = [column for column in status_table([run], {}).columns if column.header == "left"]
    assert list(left.cells) == ["0:00:00"]


@pytest.mark.parametrize("speed", [0.0, 10.0])
def test_no_time_is_left_of_a_run_that_failed(speed, tmp_path):
    (run,) = make_grid("cartpole", ["ppo"], [0], tmp_path)
    status = {"steps": 500, "total": 1000, "steps_per_second": speed, "finished": False, "last_evaluation": None}
    Path(run.folder).mkdir(parents=True)
    Path(run.folder, "status.json").write_text(json.dumps(status))
    (left,) = [column for column in status_table([run], {run.folder: "broken"}).columns if column.header == "left"]
    assert list(left.cells) == [""]


def test_the_table_says_that_a_run_is_being_resumed_until_its_first_step(tmp_path):
    runs = make_grid("cartpole", ["a2c"], [0, 1], tmp_path)
    status = {"total": 1000, "steps_per_second": 0.0, "finished": False, "last_evaluation": None}
    for run, steps in zip(runs, (0, 500), strict=True):
        Path(run.folder).mkdir(parents=True)
        Path(run.folder, "status.json").write_text(json.dumps({**status, "steps": steps}))
    (left,) = [column for column in status_table(runs, {}).columns if column.header == "left"]
    assert list(left.cells) == ["", "resuming"]


def test_what_is_given_twice_is_trained_once(tmp_path):
    for first, second in (("task1", "all-action"), ("all-action", "task1")):
        runs = make_grid("cartpole", [first, "a2c", second, "a2c"], [1, 0, 1], tmp_path)
        assert [run.name for run in runs] == [f"{first}_seed-1", f"{first}_seed-0", "a2c_seed-1", "a2c_seed-0"]


def test_a_file_is_no_folder_for_a_study(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"^study: .*cannot be made a folder \(File exists\). Name another one."):
        main(["study", "cartpole", "--algos", "a2c", "--seeds", "0", "--output", str(tmp_path / "file")])


def test_a_setting_that_is_refused_is_told_in_a_line_and_its_traceback_kept(tmp_path, offline_wandb, monkeypatch, capfd):
    arguments = ["Pendulum-v1", "--algos", "qa2c", "--seeds", "0", "--steps", "100", "--output", str(tmp_path)]
    # They are for the whole process
    monkeypatch.setattr("sb3_qac.common.process.limit_spinning", lambda: None)
    monkeypatch.setattr("sb3_qac.common.process.keep_freed_memory", lambda: None)
    assert main(["study", *arguments, "--wandb", "offline"]) == 1
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    assert "Traceback" in (tmp_path / "qa2c_seed-0" / "error.txt").read_text()
    # Below the table
    (line,) = (line for line in printed.splitlines() if "failed: " in line)
    assert line.startswith(f"{tmp_path}") and "must be `Discrete`" in line


def test_a_study_runs_each_once_and_keeps_what_it_did(tmp_path):
    runs = make_grid("cartpole", ["a2c", "task2"], [7], tmp_path, **SMALL)
    assert run_study(runs) == {}
    for run in runs:
        folder = Path(run.folder)
        evaluations = np.load(folder / "evaluations.npz")
        assert evaluations["timesteps"].tolist() == [800, 1600] and evaluations["results"].shape == (2, 3)
        kept = json.loads((folder / "run.json").read_text())
        assert kept["seed"] == run.seed and kept["versions"]["torch"] and kept["machine"]["cores"]
        status = read_json(folder / "status.json")
        assert status["finished"] and status["steps"] == 2000 and status["last_evaluation"]["steps"] == 1600
        assert list(folder.glob("tensorboard/*/*/events*")) and (folder / "CartPole-v1.zip").is_file()
    before = content(tmp_path)
    assert run_study(runs) == {}
    assert content(tmp_path) == before


def unfinished(run, monkeypatch):
    """Train a run to its last step, and let it fail then."""
    with monkeypatch.context() as patch:
        patch.setattr(StudyManager, "save_trained_model", Mock(side_effect=OSError(28, "No space left on device")))
        assert "No space left" in run_study([run])[run.folder]
    assert not run.finished


def test_a_finished_run_keeps_five_snapshots_and_no_checkpoint(tmp_path, monkeypatch):
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)
    unfinished(run, monkeypatch)
    # Of those at the start, at two evaluations and at the end, the last two
    steps = [path.name.split(".")[0] for path in checkpoints_in(Path(run.folder, "checkpoints"))]
    assert steps == ["step-000000001600", "step-000000002000"]
    assert run_study([run]) == {} and run.finished
    assert not checkpoints_in(Path(run.folder, "checkpoints"))
    snapshots = [path.name for path in sorted(Path(run.folder, "snapshots").iterdir())]
    # Steps of eight environments
    assert snapshots == [f"{step:010}.zip" for step in (0, 504, 1000, 1504, 2000)]


def test_the_last_snapshot_of_a_run_that_stopped_at_its_return_is_that_of_its_end(tmp_path):
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **{**SMALL, "n_timesteps": 20_000}, stop_return=5.0)
    assert run_study([run]) == {} and run.reached
    assert [path.name for path in sorted(Path(run.folder, "snapshots").iterdir())] == ["0000000000.zip", "0000000800.zip"]


def test_a_folder_of_other_settings_is_refused(tmp_path):
    config = tmp_path / "mine.yml"
    config.write_text("CartPole-v1: {policy: MlpPolicy, n_timesteps: 2000}")
    grid = functools.partial(make_grid, "cartpole", ["task1"], [0], tmp_path / "study", str(config))
    assert run_study(grid(**SMALL)) == {}
    before = content(tmp_path)
    for name, value in {"n_timesteps": 3000, "eval_from": 9.5}.items():
        with pytest.raises(ValueError, match=f"other settings in .*task1_seed-0: `{name}` is {value}, and was"):
            run_study(grid(**{**SMALL, name: value}))
    # A run from before there was a setting was trained without it
    path = tmp_path / "study" / "task1_seed-0" / "run.json"
    settings = json.loads(path.read_text())
    del settings["eval_from"]
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"other settings in .*task1_seed-0: `eval_from` is 9\.5, and was None"):
        run_study(grid(**SMALL, eval_from=9.5))
    assert run_study(grid(**SMALL)) == {}
    path.write_bytes(before[path])
    # Where it is computed does not matter, nor where its settings lie
    (tmp_path / "moved").mkdir()
    other = shutil.copy(config, tmp_path / "moved")
    assert run_study(make_grid("cartpole", ["task1"], [0], tmp_path / "study", other, **{**SMALL, "n_threads": 2})) == {}
    assert content(tmp_path / "study") == {path: x for path, x in before.items() if path != config}


def test_a_run_with_other_settings_that_another_process_has_just_begun_is_left_as_it_is(tmp_path):
    """Both processes found an empty folder, and one waited for the other."""
    (theirs,) = make_grid("cartpole", ["task1"], [0], tmp_path, **SMALL)
    (ours,) = make_grid("cartpole", ["task1"], [0], tmp_path, **{**SMALL, "n_eval_episodes": 2})
    assert train_run(theirs) is None
    before = content(tmp_path)
    assert "There is a run with other settings" in train_run(ours) and "`n_eval_episodes` is 2, and was 3" in train_run(ours)
    assert content(tmp_path) == before


@pytest.mark.slow
def test_several_runs_at_once_give_what_one_at_a_time_gives(tmp_path):
    grids = [make_grid("cartpole", ["task1"], [0, 1], tmp_path / str(jobs), **SMALL) for jobs in (1, 2)]
    for jobs, runs in enumerate(grids, 1):
        assert run_study(runs, jobs) == {}
    for one, other in zip(*grids, strict=True):
        results = [np.load(Path(run.folder, "evaluations.npz"))["results"] for run in (one, other)]
        np.testing.assert_array_equal(*results)


def test_a_run_that_another_process_trains_is_skipped_and_named(tmp_path, capsys):
    """So several processes, or machines with one folder, can share a study."""
    runs = make_grid("cartpole", ["task1"], [0, 1], tmp_path, **SMALL)
    with FileLock(make_folder(Path(runs[0].folder)) / "lock"):
        assert run_study(runs) == {}
        skipped = f"{runs[0].folder} is skipped: another process trains it"
        assert not runs[0].finished and runs[1].finished and skipped in capsys.readouterr().err
        assert run_study(runs, as_json=True) == {}
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
        assert json.loads(line) == {"run": runs[0].folder, "skipped": "another process trains it"}
    assert run_study(runs) == {} and runs[0].finished


def processes():
    """:return: the processes that have been started for runs"""
    children = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "spawn_main"], capture_output=True, text=True)
    return [int(child) for child in children.stdout.split()]


# At a shutdown all processes get SIGTERM, and a closed terminal ends only those of its group
@pytest.mark.parametrize(
    ("number", "to_all", "handler_raises"),
    [
        pytest.param(signal.SIGINT, False, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, False, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_all_runs_at_once_each_with_a_checkpoint(tmp_path, ctrl_c, number, to_all, handler_raises):
    runs = make_grid("cartpole", ["task1"], [0, 1, 2], tmp_path, n_timesteps=10**7, eval_freq=10**7, wandb="disabled")
    checkpoints = [Path(run.folder, "checkpoints") for run in runs]
    left_behind = []

    def handle(number, frame):
        # The default handlers end the process here
        left_behind.extend(processes())
        if handler_raises:
            raise KeyboardInterrupt

    def stop_all():
        # Not at the first checkpoint, which is written before the first step: nothing needs to be saved until then
        while not all(read_json(Path(run.folder, "status.json")).get("steps", 0) > 0 for run in runs[:2]):
            time.sleep(0.1)
        for process in [*(processes() if to_all else []), os.getpid()]:
            os.kill(process, number)

    handler = signal.signal(number, handle)
    threading.Thread(target=stop_all, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_study(runs, jobs=2)
    finally:
        signal.signal(number, handler)
    for run, folder in zip(runs[:2], checkpoints, strict=False):
        last = int(checkpoints_in(folder)[-1].name.split(".")[0].removeprefix("step-"))
        # `status.json` is written every two seconds at most, so it may be older
        assert last > 0 and last >= read_json(Path(run.folder, "status.json"))["steps"]
    # No run was begun afterwards, and no process is left
    assert not Path(runs[2].folder, "run.json").exists()
    assert processes() == left_behind == []


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_while_processes_start_is_not_lost(tmp_path):
    """They block it until they can handle it."""
    runs = make_grid("cartpole", ["task1"], [0, 1], tmp_path, n_timesteps=10**7, eval_freq=10**7, wandb="disabled")

    def stop():
        while len(processes()) < 2:
            time.sleep(0.01)
        for process in [*processes(), os.getpid()]:
            os.kill(process, signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_study(runs, jobs=2)
    assert not any(Path(run.folder, "run.json").exists() for run in runs) and processes() == []


@pytest.mark.slow
def test_a_run_whose_process_is_killed_is_named_and_the_others_go_on(tmp_path):
    long, short = (
        make_grid("cartpole", ["task1"], [seed], tmp_path, **{**SMALL, "n_timesteps": steps})
        for seed, steps in enumerate((10**7, 2000))
    )

    def kill():
        while not Path(long[0].folder, "status.json").exists() or not short[0].finished:
            time.sleep(0.1)
        for process in processes():
            os.kill(process, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    failed = run_study([*long, *short], jobs=2)
    assert list(failed) == [long[0].folder] and "was killed (exit code -9)" in failed[long[0].folder]
    assert short[0].finished


def test_a_failed_run_is_reported_and_does_not_stop_the_others(tmp_path):
    good = make_grid("cartpole", ["task1"], [0, 1], tmp_path, **SMALL)
    bad = Run(**{**vars(good[0]), "hyperparams": {"gamma": -1}})
    assert list(run_study([bad, good[1]])) == [bad.folder]
    assert "`gamma`" in Path(bad.folder, "error.txt").read_text()
    assert good[1].finished and not bad.finished
    # Mended, it is tried again
    assert run_study(good) == {}
    assert not Path(bad.folder, "error.txt").exists()


def test_of_an_error_of_several_lines_the_first_is_told(tmp_path, monkeypatch):
    """The last one may be a tensor, as where an algorithm of SB3 diverges."""
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)
    monkeypatch.setattr("sb3_qac.study.train._train", Mock(side_effect=ValueError("Invalid values:\ntensor([nan])")))
    assert run_study([run]) == {run.folder: "ValueError: Invalid values:"}
    assert "tensor([nan])" in Path(run.folder, "error.txt").read_text()


def test_an_id_with_a_module_is_refused_with_the_option_for_it(tmp_path):
    with pytest.raises(ValueError, match=r"Give Mine-v0 and `--gym-packages my\.package`: it imports the module"):
        make_grid("my.package:Mine-v0", ["a2c"], [0], tmp_path)


def test_a_run_is_finished_once_its_model_is_saved(tmp_path, monkeypatch):
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)
    unfinished(run, monkeypatch)
    assert run_study([run]) == {} and run.finished
    assert Path(run.folder, "CartPole-v1.zip").is_file() and not Path(run.folder, "error.txt").exists()


def test_a_run_that_failed_after_its_first_step_keeps_its_settings(tmp_path, monkeypatch):
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)
    unfinished(run, monkeypatch)
    before = Path(run.folder, "run.json").read_text()
    with pytest.raises(ValueError, match=r"There is a run with other settings .*`hyperparams` is {'gamma': 0.5}, and was {}"):
        run_study([replace(run, hyperparams={"gamma": 0.5})])
    assert Path(run.folder, "run.json").read_text() == before


def fail_at(monkeypatch, n_steps):
    """Environments of CartPole fail in the step after this number of steps."""
    step, seen = CartPoleEnv.step, []

    def failing(self, action):
        seen.append(action)
        if len(seen) > n_steps:
            raise OSError("broken")
        return step(self, action)

    monkeypatch.setattr(CartPoleEnv, "step", failing)


def interrupt_at(monkeypatch, n_steps):
    """Ctrl-C after this number of steps, at which the training writes a checkpoint."""

    def interrupt(callback):
        if callback.model.num_timesteps == n_steps:
            signal.raise_signal(signal.SIGINT)
        return True

    monkeypatch.setattr(SnapshotCallback, "_on_step", interrupt)


def test_a_run_that_failed_within_its_first_seconds_keeps_its_settings(tmp_path, monkeypatch):
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)
    with monkeypatch.context() as patch:
        fail_at(patch, 400)
        assert "broken" in run_study([run])[run.folder]
    # The last rollout is not over
    assert 0 < read_json(Path(run.folder, "status.json"))["steps"] <= 400
    with pytest.raises(ValueError, match="There is a run with other settings"):
        run_study([replace(run, eval_freq=500)])
    assert run_study([run]) == {} and run.finished


def test_a_run_that_failed_in_its_first_step_may_have_other_settings(tmp_path, monkeypatch):
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)
    with monkeypatch.context() as patch:
        fail_at(patch, 0)
        assert "broken" in run_study([run])[run.folder]
    other = replace(run, hyperparams={"learning_rate": 1e-4})
    assert run_study([other]) == {} and other.finished
    assert read_json(Path(run.folder, "run.json"))["hyperparams"] == {"learning_rate": 1e-4}


def test_a_run_that_left_a_checkpoint_has_begun(tmp_path):
    """Its process may have been killed before it wrote the status, and failed to start again."""
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)
    checkpoints = make_folder(Path(run.folder, "checkpoints"))
    Path(run.folder, "error.txt").touch()
    (checkpoints / f"step-{0:012d}.{0:016x}.safetensors").touch()
    assert run.failed_at_once
    (checkpoints / f"step-{1000:012d}.{0:016x}.safetensors").touch()
    assert not run.failed_at_once


def test_settings_that_never_worked_are_forgotten_also_if_the_next_try_is_interrupted(tmp_path, monkeypatch):
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)
    assert "Error" in run_study([replace(run, hyperparams={"n_steps": "five"})])[run.folder]
    with monkeypatch.context() as patch:
        patch.setattr("sb3_qac.study.train.wandb_run_of", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_study([run])
    assert run_study([run]) == {} and run.finished


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.param(OSError, marks=pytest.mark.slow)])
def test_the_time_of_a_run_does_not_include_that_between_two_of_its_lives(error, tmp_path, monkeypatch):
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)
    status, clock = Path(run.folder, "status.json"), time.monotonic
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1000)
        train_run(run)
    before = read_json(status)["seconds"]
    with monkeypatch.context() as patch:
        # A day later the training cannot start
        patch.setattr("sb3_qac.study.callbacks.time.monotonic", lambda: clock() + 86_400)
        patch.setattr(CurvesCallback, "_on_training_start", Mock(side_effect=error))
        with contextlib.suppress(KeyboardInterrupt):
            run_study([run])
    assert read_json(status)["seconds"] == before > 0
    assert run_study([run]) == {}
    assert before < read_json(status)["seconds"] < 3600


def test_a_status_that_cannot_be_written_does_not_hide_why_a_training_failed(tmp_path, monkeypatch):
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)

    def fail(self):
        monkeypatch.setattr("sb3_qac.study.callbacks.write_atomically", Mock(side_effect=OSError(28, "No space left")))
        raise FloatingPointError("the loss is not finite")

    monkeypatch.setattr(A2C, "train", fail)
    assert "the loss is not finite" in run_study([run])[run.folder]


def test_an_error_that_cannot_be_written_is_told_and_does_not_stop_the_others(tmp_path, monkeypatch):
    runs = make_grid("cartpole", ["a2c"], [0, 1], tmp_path, **SMALL)
    error = OSError(28, "No space left on device")
    monkeypatch.setattr(StudyManager, "setup_experiment", Mock(side_effect=error))
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=error))
    assert run_study(runs) == dict.fromkeys([run.folder for run in runs], "OSError: [Errno 28] No space left on device")


def test_a_run_that_is_tried_again_does_not_count_as_failed(tmp_path, monkeypatch):
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)
    with monkeypatch.context() as patch:
        fail_at(patch, 400)
        run_study([run])
    assert load_run(Path(run.folder)).failed
    seen = []

    def learn(self, model):
        seen.append(load_run(Path(run.folder)).failed)
        raise OSError("broken again")

    monkeypatch.setattr(StudyManager, "learn", learn)
    run_study([run])
    assert seen == [False] and load_run(Path(run.folder)).failed


def test_an_interrupted_run_has_no_final_agent(tmp_path, monkeypatch):
    (run,) = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(A2C, "train", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_study([run])
    folder = Path(run.folder)
    with pytest.raises(ValueError, match=r"There is no final agent in .*a2c_seed-0: the run is not finished"):
        final_agent(run, folder)
    assert run_study([run]) == {}
    assert final_agent(run, folder) == folder / "CartPole-v1.zip"
    (folder / "CartPole-v1.zip").unlink()
    with pytest.raises(ValueError, match=r"There is no CartPole-v1.zip in .*, although the run is finished"):
        final_agent(run, folder)


def test_a_study_in_an_exception_handler_finishes(tmp_path):
    runs = make_grid("cartpole", ["a2c"], [0], tmp_path, **SMALL)
    try:
        raise KeyError("of the caller")
    except KeyError:
        assert run_study(runs) == {}
    assert runs[0].finished


def test_a_run_stops_at_its_return(tmp_path):
    (run,) = make_grid("cartpole", ["task1"], [0], tmp_path, stop_return=5.0, **SMALL)
    assert train_run(run) is None
    assert run.finished and read_json(Path(run.folder, "status.json"))["steps"] == 800


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_evaluations_begin_when_training_episodes_reach_a_return_and_take_place_at_the_same_steps(tmp_path, monkeypatch):
    def evaluations(name, **settings):
        (run,) = make_grid("cartpole", ["task1"], [0], tmp_path / name, **{**SMALL, "eval_freq": 200, **settings})
        assert train_run(run) is None
        assert run.finished
        if not Path(run.folder, "evaluations.npz").exists():
            return {}
        kept = np.load(Path(run.folder, "evaluations.npz"))
        return dict(zip(kept["timesteps"].tolist(), kept["results"].tolist(), strict=True))

    reached = []

    class Watched(EvaluateFromReturn):
        def _on_step(self):
            if self.model.num_timesteps == interrupt_at:
                signal.raise_signal(signal.SIGINT)
            super()._on_step()
            last = [episode["r"] for episode in self.model.ep_info_buffer][-SMALL["n_eval_episodes"] :]
            reached.append((self.model.num_timesteps, len(last) == SMALL["n_eval_episodes"] and np.mean(last) >= bound))
            return True

    monkeypatch.setattr("sb3_qac.study.manager.EvaluateFromReturn", Watched)
    # Early enough that evaluations are left out, and late enough that there are some
    bound, interrupt_at = 25.0, None
    every, some = evaluations("every"), evaluations("some", eval_from=bound)
    first = next(step for step, is_reached in reached if is_reached)
    assert list(some) == [step for step in every if step >= first] and 0 < len(some) < len(every)
    # It is never reached, so there is one at the end, once, although the last rollout is longer
    assert list(evaluations("none", eval_from=501.0, n_timesteps=410)) == [416]

    # A resume remembers whether it was switched on, although the last episodes may be worse again
    interrupt_at = next(iter(some)) - 80
    (run,) = make_grid("cartpole", ["task1"], [0], tmp_path / "stopped", **{**SMALL, "eval_freq": 200, "eval_from": bound})
    train_run(run)
    assert not run.finished
    interrupt_at = None
    assert evaluations("stopped", eval_from=bound) == some


@pytest.mark.usefixtures("ctrl_c")
def test_the_time_and_the_commits_of_a_run_are_those_of_all_its_starts(tmp_path, monkeypatch):
    (run,) = make_grid("cartpole", ["task1"], [0], tmp_path, **SMALL)
    clock = time.monotonic
    with monkeypatch.context() as patch:
        patch.setattr("sb3_qac.study.callbacks.time", types.SimpleNamespace(monotonic=lambda: 1000 * clock()))
        interrupt_at(patch, 1000)
        train_run(run)
    path = Path(run.folder, "status.json")
    status = read_json(path)
    assert not status["finished"]
    kept = dict(load_checkpoint(checkpoints_in(Path(run.folder, "checkpoints"))[-1]).state["callbacks"])["StatusCallback"]
    # The checkpoint does not know the time of the last update before it
    seconds = kept["last_step"] - kept["start"]
    assert 10 < seconds < status["seconds"]
    # As if it had been killed long after its checkpoint: the steps in between are made again
    path.write_text(json.dumps({**status, "seconds": status["seconds"] + 1000}))
    settings = Path(run.folder, "run.json")
    commit = read_json(settings)["commit"]
    settings.write_text(json.dumps({**read_json(settings), "commit": "1234567"}))
    assert train_run(run) is None
    # The code of both starts has a part in it
    assert read_json(settings)["commit"] == f"1234567, {commit}"
    assert run.finished and seconds < read_json(path)["seconds"] < status["seconds"] + 100


def test_a_resumed_run_without_a_known_commit_has_none(tmp_path):
    """As with a package that was not installed from a checkout."""
    (run,) = make_grid("cartpole", ["task1"], [0], tmp_path, **SMALL)
    checkpoint = Path(run.folder, "checkpoints", f"step-{8:012d}.{16 * '0'}.safetensors")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    for before, now, both in (
        (None, None, None),
        (None, "b", "b"),
        ("a", None, "a"),
        ("a, b", "b", "a, b"),
        ("a", "b", "a, b"),
    ):
        Path(run.folder, "run.json").write_text(json.dumps({"commit": before}))
        assert commits_of(run, now) == both
    # One that begins anew has only its own
    checkpoint.unlink()
    assert commits_of(run, "b") == "b"


def test_a_finished_run_with_other_hyperparameters_is_refused(tmp_path):
    """The file was edited."""
    path, entries = tmp_path / "mine.yml", dict(n_timesteps=16, policy="MlpPolicy", n_steps=8, n_envs=1)
    path.write_text(yaml.safe_dump({"CartPole-v1": {**entries, "ent_coef": 0.1}}))
    grid = functools.partial(
        make_grid, "CartPole-v1", ["qa2c"], folder=tmp_path, config=str(path), **{**SMALL, "n_timesteps": 16}
    )
    assert run_study(grid(seeds=[0])) == {} == run_study(grid(seeds=[0]))
    path.write_text(yaml.safe_dump({"CartPole-v1": {**entries, "ent_coef": 0.5, "n_timesteps": 99}}))
    with pytest.raises(
        ValueError, match=r"qa2c_seed-0 is a finished run with other.*: `ent_coef` is 0\.5, and was 0\.1\. Its"
    ):
        run_study(grid(seeds=[0, 1]))
    assert not (tmp_path / "qa2c_seed-1").exists()


@pytest.mark.parametrize("kind", ["finished", "unfinished"])
def test_a_run_whose_file_has_another_number_of_steps_now_is_refused(kind, tmp_path):
    """Schedules depend on it. `--steps` replaces it."""
    path, entries = tmp_path / "mine.yml", dict(policy="MlpPolicy", n_steps=8, n_envs=1)
    path.write_text(yaml.safe_dump({"CartPole-v1": {**entries, "n_timesteps": 16}}))
    (run,) = make_grid("CartPole-v1", ["qa2c"], [0], tmp_path, config=str(path), **{**SMALL, "n_timesteps": 0})
    assert run_study([run]) == {}
    if kind == "unfinished":
        status = Path(run.folder, "status.json")
        status.write_text(json.dumps({**json.loads(status.read_text()), "finished": False}))
    path.write_text(yaml.safe_dump({"CartPole-v1": {**entries, "n_timesteps": 800}}))
    with pytest.raises(ValueError, match=f"an? {kind} run with other hyperparameters: `n_timesteps` is 800, and was 16"):
        run_study([run])


def test_an_unfinished_run_that_is_refused_keeps_its_record(tmp_path, monkeypatch):
    """A pack of it would have the new hyperparameters, commit and machine, and the evaluations come from the old ones."""
    path, entries = tmp_path / "mine.yml", dict(policy="MlpPolicy", n_steps=8, n_envs=1, n_timesteps=400)
    path.write_text(yaml.safe_dump({"CartPole-v1": {**entries, "ent_coef": 0.1}}))
    (run,) = make_grid("CartPole-v1", ["qa2c"], [0], tmp_path, config=str(path), **{**SMALL, "n_timesteps": 0})
    unfinished(run, monkeypatch)
    path.write_text(yaml.safe_dump({"CartPole-v1": {**entries, "ent_coef": 0.5}}))
    monitor = Path(run.folder, "0.monitor.csv")
    before, rows = Path(run.folder, "run.json").read_bytes(), monitor.read_bytes()
    assert len(rows.splitlines()) > 2
    with monkeypatch.context() as patch:
        patch.setattr("sb3_qac.study.train.provenance", lambda: {"commit": "later", "machine": {"cores": 1000}})
        assert r"ent_coef is 0.5, and was 0.1" in train_run(run)
    assert Path(run.folder, "run.json").read_bytes() == before and monitor.read_bytes() == rows
    assert load_run(Path(run.folder)).settings["resolved_hyperparams"]["ent_coef"] == 0.1
    # An argument at its default may be written out
    path.write_text(yaml.safe_dump({"CartPole-v1": {**entries, "ent_coef": 0.1, "gamma": 0.99}}))
    assert run_study([run]) == {}


@pytest.mark.parametrize("where", ["file", "run"])
@pytest.mark.parametrize("entry", [{"normalize": {"norm_reward": False}}, {"policy_kwargs": {"net_arch": [16]}}])
def test_a_run_whose_hyperparameters_have_dictionaries_is_found_again(entry, where, tmp_path):
    """RL Zoo adds the discount to the first, and SB3's A2C the optimizer to the second."""
    path, entries = tmp_path / "mine.yml", dict(policy="MlpPolicy", n_steps=8, n_envs=1, n_timesteps=16, gamma=0.9)
    path.write_text(yaml.safe_dump({"CartPole-v1": {**entries, **(entry if where == "file" else {})}}))
    given = {} if where == "file" else copy.deepcopy(entry)
    settings = dict(config=str(path), hyperparams=given, **{**SMALL, "n_timesteps": 0})
    runs = make_grid("CartPole-v1", ["a2c"], [0, 1], tmp_path, **settings)
    for _ in range(2):
        assert run_study(runs) == {} and all(run.finished for run in runs)
    assert all(run.hyperparams == given for run in runs)
    (name,) = entry
    assert read_config(Path(runs[0].folder, "CartPole-v1", "config.yml"))[name] == entry[name]


@pytest.mark.parametrize(("native", "before"), [(True, []), (True, ["sb3_qac.common.env_util.to_ale_vec_env"]), (False, [])])
def test_a_wrapper_of_vectorised_environments_is_kept(native, before, tmp_path):
    wrappers = [*before, {"stable_baselines3.common.vec_env.VecFrameStack": {"n_stack": 2}}]
    entries = {"vec_env_wrapper": wrappers, "frame_stack": None, "n_envs": 1}
    (run,) = make_grid("PongNoFrameskip-v4", ["a2c"], [0], tmp_path, hyperparams=entries, native=native, **SMALL)
    manager = StudyManager(run)
    hyperparams, _ = manager.read_hyperparameters()
    _, manager.env_wrapper, _, manager.vec_env_wrapper = manager._preprocess_hyperparams(hyperparams)
    env = manager.create_envs(1)
    assert env.observation_space.shape == (2, 84, 84) and isinstance(env.unwrapped, AleVecEnv) == native
    env.close()


@pytest.mark.parametrize(("name", "text"), [("mine.txt", "CartPole-v1: {}"), ("mine.py", "presets = {}")])
def test_a_file_of_hyperparameters_of_another_kind_is_refused(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    command = ["study", "CartPole-v1", "--algos", "qa2c", "--conf-file", str(tmp_path / name), "--output", str(tmp_path / "o")]
    for steps in ([], ["--steps", "16"]):
        with pytest.raises(
            SystemExit, match=rf"^study: .*{name} cannot be read: .*YAML file.*Python file.*in `hyperparams`\."
        ):
            main([*command, *steps])


@pytest.mark.parametrize("env_id", ["CartPole-v1", "ALE/Pong-v5", "my_module:My.Own-v0", "my_module:games/Mine-v0"])
def test_paths_have_rl_zoos_name_of_the_environment(env_id):
    assert env_dirname(env_id) == EnvironmentName(env_id)


def test_an_unfinished_run_whose_file_makes_other_environments_now_is_refused(tmp_path):
    """Its checkpoint has the old ones, which the training would keep, while later evaluations would have the new ones."""
    path, entries = tmp_path / "mine.yml", dict(policy="MlpPolicy", n_steps=8, n_envs=1, n_timesteps=16)
    path.write_text(yaml.safe_dump({"CartPole-v1": entries}))
    (run,) = make_grid("CartPole-v1", ["qa2c"], [0], tmp_path, config=str(path), **{**SMALL, "n_timesteps": 0})
    assert run_study([run]) == {}
    status = Path(run.folder, "status.json")
    status.write_text(json.dumps({**json.loads(status.read_text()), "finished": False}))
    for entry, value in {"env_kwargs": {"sutton_barto_reward": True}, "normalize": True}.items():
        path.write_text(yaml.safe_dump({"CartPole-v1": {**entries, entry: value}}))
        with pytest.raises(ValueError, match=f"an unfinished run with other hyperparameters: `{entry}` is .*, and was None"):
            run_study([run])


def test_evaluations_have_the_environment_arguments_of_the_hyperparameters(tmp_path):
    entries = {"env_kwargs": {"is_slippery": False}}
    (run,) = make_grid("FrozenLake-v1", ["qppo"], [0], tmp_path, hyperparams=entries, **SMALL)
    manager = StudyManager(run)
    try:
        manager.setup_experiment()
        slippery = [spec.kwargs["is_slippery"] for env in manager.envs for spec in env.get_attr("spec")]
    finally:
        for env in manager.envs:
            env.close()
    # Those of the training, and those of the evaluation
    assert len(manager.envs) == 2 and not any(slippery)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"mine\.yml has no hyperparameters by environment"),
        ("- 1", r"mine\.yml has no hyperparameters by environment"),
        ("a: [1", r"mine\.yml is not a YAML file.*expected ',' or ']'"),
        ("Acrobot-v1: {n_envs: 1}", "Hyperparameters not found for qa2c-CartPole-v1"),
        ("CartPole-v1: {n_envs: 1}", "has no entry 'n_timesteps' for CartPole-v1"),
        ("CartPole-v1: {n_timesteps: 1}", "has no entry 'policy' for CartPole-v1"),
        (
            "CartPole-v1: {n_timesteps: abc, policy: MlpPolicy}",
            "`n_timesteps` for `CartPole-v1` in `.*mine.yml` must be .*'abc'",
        ),
        ("CartPole-v1: {n_timesteps: 0, policy: MlpPolicy}", "`n_timesteps` .*at least 1, but 0 was given"),
        ("CartPole-v1: {n_timesteps: 1, policy: MlpPolicy, n_envs: 0}", "`n_envs` .*at least 1, but 0 was given"),
        (
            "CartPole-v1: {n_timesteps: 1e3}",
            "has the entry 'n_timesteps' .*is the text '1e3'. YAML floats need a decimal point: 1.0e-3",
        ),
        ("CartPole-v1: {learning_rate: 1e-3}", "has the entry 'learning_rate' .*is the text '1e-3'"),
        ("CartPole-v1: {seed: 3}", "has the entry 'seed' for CartPole-v1, which is neither an argument"),
        ("CartPole-v1: {n_timesteps: 1, ent_ceof: 1}", r"the entry 'ent_ceof' for CartPole-v1.*argument of QA2C \(.*ent_coef"),
    ],
)
def test_a_file_of_hyperparameters_is_checked_before_any_training(text, message, tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(text)
    command = ["study", "CartPole-v1", "--algos", "qa2c", "--conf-file", str(path), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=f"(?s)^study: .*{message}"):
        main(command)
    assert not list((tmp_path / "out").rglob("run.json"))
    if text.startswith("Acrobot"):
        with pytest.raises(
            SystemExit, match=r"not found for qa2c-PongNoFrameskip-v4 in .*, which has no PongNoFrameskip-v4 or `atari`"
        ):
            main(["study", "PongNoFrameskip-v4", *command[2:]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "`device` is 'cuda', but PyTorch finds no GPU. Use 'cpu', or 'auto'"),
        (["--device", "gpu"], "`device` must be 'auto', 'cpu' or 'cuda'.* but 'gpu' was given"),
        (["--device", "meta"], "`device` must be 'auto', 'cpu' or 'cuda'.* but 'meta' was given"),
        (["--seeds", "99999999999"], "`seeds` must be an integer, between 0 and 4294967295, but 99999999999"),
    ],
)
def test_what_every_run_would_fail_by_is_refused_at_the_start(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setattr(th.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=message):
        main(["study", "cartpole", *arguments, "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="ALE/Pong-v5 skips 4 frames itself"):
        main(["study", "ALE/Pong-v5", "--output", str(tmp_path / "out")])
    assert not list((tmp_path / "out").rglob("run.json"))


def test_a_gpu_is_sought_on_the_machine_that_trains(tmp_path, monkeypatch):
    """The one that gives runs to a Ray cluster need not have one."""
    monkeypatch.setattr(th.cuda, "is_available", lambda: False)
    command = ["study", "CartPole-v1", "--algos", "a2c", "--seeds", "0", "--device", "cuda", "--ray", "auto"]
    (run,) = grid_of(make_parser().parse_args(command), tmp_path)
    assert run.device == "cuda"
    assert "but PyTorch finds no GPU" in train_run(run)


@pytest.mark.slow
def test_a_study_trains_on_an_environment_of_ones_own(tmp_path, monkeypatch):
    """The module is imported in the processes of ``--jobs`` too, and by the commands that read the run."""
    (tmp_path / "my_package.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Mine(CartPoleEnv):\n"
        "    def __init__(self, length, **kwargs):\n"
        "        super().__init__(**kwargs)\n"
        "gymnasium.register('MyCartPole-v0', CartPoleEnv, max_episode_steps=50)\n"
        "gymnasium.register('games/My.Own-v0', Mine, max_episode_steps=50)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--seeds", "0", "--steps", "600", "--eval-freq", "300", "--eval-episodes", "2", "--wandb", "disabled"]
    command = ["study", "MyCartPole-v0", "--algos", "qppo", *options, "--output", str(tmp_path / "study")]
    with pytest.raises(SystemExit, match="`--gym-packages` imports the module that registers"):
        main(command)
    for name in ("nowhere", "./my_package.py", ""):
        with pytest.raises(
            SystemExit, match=f"`--gym-packages` must be modules that Python can import, but '{name}' was given"
        ):
            main([*command, "--gym-packages", name])
    assert main([*command, "--gym-packages", "my_package", "--jobs", "2"]) == 0
    (first,) = make_grid("MyCartPole-v0", ["qppo"], [0], tmp_path / "study", gym_packages=["my_package"])
    assert first.finished and read_run(Path(first.folder)).gym_packages == ["my_package"]
    assert main(["evaluate", first.folder, "--episodes", "2"]) == 0
    assert command_of(load_run(Path(first.folder)).settings).endswith("--gym-packages my_package")
    # Its argument has no default, and is among the hyperparameters. SB3 takes what follows the point for the suffix of a file
    settings = {**SMALL, "n_timesteps": 600, "gym_packages": ["my_package"]}
    own = {"env_kwargs": {"length": 1}}
    (run,) = make_grid("games/My.Own-v0", ["qppo"], [0], tmp_path / "own", hyperparams=own, **settings)
    assert run_study([run]) == {}
    assert final_agent(run, Path(run.folder)).name == "games-My.Own-v0.zip"
    assert main(["evaluate", run.folder, "--episodes", "2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "eval_freq"),
    [
        (["pong"], 300_000),
        (["pong", "--steps", "20000"], 5_000),
        (["pong", "--steps", "2"], 1),
        (["pong", "--steps", "20000", "--eval-freq", "300000"], 300_000),
        # The preset has 50,000 steps
        (["CartPole-v1", "--algos", "qppo"], 12_500),
        (["cartpole", "--steps", "1000000"], 50_000),
        # Short studies keep their own
        (["tabular"], 50_000),
        (["ladder"], 25_000),
    ],
)
def test_a_short_training_is_evaluated_at_every_quarter(arguments, eval_freq, tmp_path):
    runs = grid_of(make_parser().parse_args(["study", *arguments, "--seeds", "0"]), tmp_path)
    assert {run.eval_freq for run in runs} == {eval_freq}


def test_a_rollout_that_is_much_longer_than_the_training_is_told(tmp_path):
    # RL Zoo's presets for every environment have SB3's 2,048 steps of PPO, and one environment
    grid = functools.partial(make_grid, "FrozenLake-v1", ["ppo"], [0, 1], tmp_path)
    (line,) = notes(grid(n_timesteps=20_000, eval_freq=1, hyperparams={"n_envs": 8}))
    assert line.startswith("ppo on FrozenLake-v1 trains 32,768 steps instead of 20,000, because each rollout has 16,384 ")
    # 2 % more
    assert not list(notes(grid(n_timesteps=20_000, eval_freq=1)))
    # The algorithm refuses it
    assert not list(notes(grid(n_timesteps=20_000, eval_freq=1, hyperparams={"n_steps": "five"})))


def test_algorithms_with_other_numbers_of_environments_are_told(tmp_path):
    algos = ["a2c", "qppo", "all-action"]
    (line,) = notes(make_grid("FrozenLake-v1", [*algos, "ppo"], [0, 1], tmp_path, n_timesteps=81_920, eval_freq=1))
    assert "on FrozenLake-v1 algorithms are compared that have different numbers of environments: " in line
    assert "8 (a2c), 8 (qppo), 8 (all-action), 1 (ppo)." in line
    assert not list(notes(make_grid("FrozenLake-v1", algos, [0], tmp_path, n_timesteps=81_920, eval_freq=1)))


@pytest.fixture
def mynet(tmp_path, monkeypatch):
    """A module with networks and an environment of one's own."""
    (tmp_path / "mynet.py").write_text(
        "import gymnasium\n"
        "import torch as th\n"
        "from stable_baselines3.common.torch_layers import FlattenExtractor\n"
        "from sb3_qac.qa2c import MlpPolicy\n"
        "from tests.envs import ObservationsOf\n"
        "class TinyNet(FlattenExtractor):\n"
        "    pass\n"
        "class TinyPolicy(MlpPolicy):\n"
        "    pass\n"
        "for space in ObservationsOf.SPACES:\n"
        "    gymnasium.register(f'{space.title().replace(\" \", \"\")}-v0', ObservationsOf, kwargs={'space': space})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = set(gym.registry)
    yield "mynet"
    for env_id in gym.registry.keys() - before:
        del gym.registry[env_id]
    sys.modules.pop("mynet", None)
    vars(rl_zoo3.exp_manager).pop("mynet", None)


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ("policy: mynet.TinyPolicy", "TinyPolicy"),
        ("policy: MlpPolicy, policy_kwargs: 'dict(features_extractor_class=mynet.TinyNet)'", "TinyNet"),
    ],
)
def test_hyperparameters_name_classes_of_a_package_of_ones_own(entries, found, mynet, tmp_path):
    (tmp_path / "mine.yml").write_text(f"Vectors-v0: {{n_timesteps: 16, n_envs: 1, {entries}}}")
    (run,) = make_grid("Vectors-v0", ["qa2c"], [0], tmp_path, str(tmp_path / "mine.yml"), gym_packages=[mynet], **SMALL)
    with model_of(run) as model:
        assert found in (type(model.policy).__name__, type(model.policy.features_extractor).__name__)


@pytest.mark.parametrize("algo", ["all-action", "qppo", "reinforce", "a2c", "ppo", "dqn"])
@pytest.mark.parametrize(
    ("env_id", "policy"),
    [("Dictionaries-v0", "MultiInputPolicy"), ("Images-v0", "CnnPolicy"), ("SmallImages-v0", "MlpPolicy")],
)
def test_every_algorithm_of_a_study_has_a_policy_for_the_observations(algo, env_id, policy, mynet, tmp_path):
    (run,) = make_grid(env_id, [algo], [0], tmp_path, gym_packages=[mynet], **SMALL, hyperparams={"n_envs": 2})
    lines = list(notes([run]))
    assert any(line.startswith(f"{run.algo} has {policy} on {env_id}") for line in lines) == (policy != "MlpPolicy")
    with model_of(run) as model:
        assert model.policy_class is model.policy_aliases[policy]


def test_a_run_whose_policy_follows_from_its_observations_is_found_again(mynet, tmp_path, capsys):
    options = ["--gym-packages", mynet, "--steps", "80", "--eval-episodes", "1", "--wandb", "disabled"]
    command = [
        "study",
        "Dictionaries-v0",
        "--algos",
        "qa2c",
        "a2c",
        "--seeds",
        "0",
        *options,
        "--output",
        str(tmp_path / "study"),
    ]
    assert main(command) == 0
    assert "study: qa2c has MultiInputPolicy on Dictionaries-v0 instead of" in capsys.readouterr().err
    for run in (tmp_path / "study").glob("*/run.json"):
        assert read_config(run.parent / "Dictionaries-v0" / "config.yml")["policy"] == "MultiInputPolicy"
    before = content(tmp_path / "study")
    assert main(command) == 0
    assert content(tmp_path / "study") == before and "MultiInputPolicy" not in capsys.readouterr().err


def test_params_replace_entries_of_the_presets_of_all_algorithms(tmp_path):
    options = ["--steps", "80", "--eval-episodes", "1", "--seeds", "0", "--wandb", "disabled", "--output", str(tmp_path)]
    given = ["n_envs:2", "normalize:True", "gamma:0.9", "policy_kwargs:'dict(activation_fn=nn.ReLU)'"]
    assert main(["study", "CartPole-v1", "--algos", "all-action", "a2c", *options, "-params", *given]) == 0
    for name in ("all-action_seed-0", "a2c_seed-0"):
        config = read_config(tmp_path / name / "CartPole-v1" / "config.yml")
        assert (config["n_envs"], config["normalize"], config["gamma"]) == (2, True, 0.9)
        assert (tmp_path / name / "CartPole-v1" / "vecnormalize.pkl").is_file()
        model = ALGOS[read_run(tmp_path / name).algo].load(tmp_path / name / "CartPole-v1.zip")
        assert model.n_envs == 2 and model.policy.activation_fn is th.nn.ReLU
    # Another setting is another run
    with pytest.raises(SystemExit, match=r"There is a run with other settings .*`hyperparams` is"):
        main(["study", "CartPole-v1", "--algos", "all-action", *options])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("gamma", "NAME:VALUE .*, but 'gamma' was given"),
        ("policy:CnnPolicy", r"name 'CnnPolicy' is not defined"),
        ("policy_kwargs:dict(activation_fn=nn.ReLU)", "Classes are named in a text"),
        ("beta:0.5", "`-params` has beta, which the name all-action already sets"),
        ("ent_ceof:1", "`-params` or the group all-action has the entry 'ent_ceof' for CartPole-v1, which is neither"),
    ],
)
def test_params_that_cannot_be_used_are_refused_before_any_training(entry, message, tmp_path):
    with pytest.raises(SystemExit, match=f"^study: .*{message}"):
        main(["study", "CartPole-v1", "--algos", "all-action", "--output", str(tmp_path), "-params", entry])
    assert not list(tmp_path.rglob("run.json"))


# RL Zoo's PPO for Pendulum has state-dependent exploration
@pytest.mark.parametrize(
    ("env_id", "algo"),
    [pytest.param("cartpole", "dqn", marks=pytest.mark.slow), pytest.param("Pendulum-v1", "ppo", marks=pytest.mark.slow)],
)
def test_a_run_that_cannot_be_resumed_runs_all_the_same(env_id, algo, tmp_path):
    (run,) = make_grid(env_id, [algo], [0], tmp_path, **SMALL)
    assert train_run(run) is None
    assert run.finished and not checkpoints_in(Path(run.folder, "checkpoints"))


@pytest.mark.parametrize(("algo", "native"), [("task1", True), pytest.param("ppo", False, marks=pytest.mark.slow)])
def test_evaluations_are_of_whole_new_games_on_games_of_their_own(algo, native, tmp_path):
    """RL Zoo's preset of PPO has no wrapper for new games."""
    settings = {**SMALL, "native": native, "hyperparams": {"n_envs": 2}}
    (run,) = make_grid("BreakoutNoFrameskip-v4", [algo], [3], tmp_path, **settings)
    manager = StudyManager(run)
    model, _ = manager.setup_experiment()
    (evaluation,) = [callback for callback in manager.callbacks if isinstance(callback, EvalCallback)]
    assert not evaluation.deterministic and evaluation.eval_env.num_envs == 3
    training, evaluating = model.env.unwrapped, evaluation.eval_env.unwrapped
    for env in (training, evaluating):
        assert env.terminal_on_life_loss if native else is_wrapped(env.envs[0], EpisodicLifeEnv)
    assert not {*np.ravel(training._seeds)} & {*np.ravel(evaluating._seeds)}
    # The reset of the second evaluation comes in the middle of games
    for _ in range(2):
        evaluating.reset()
        if not native:
            assert [env.unwrapped.ale.lives() for env in evaluating.envs] == [5, 5, 5]
        infos = evaluating.step(np.zeros(3, dtype=int))[3]
        assert [info["lives"] for info in infos] == [5, 5, 5]
        while all(info["lives"] == 5 for info in infos):
            infos = evaluating.step(np.zeros(3, dtype=int))[3]
    model.env.close()
    evaluation.eval_env.close()


def test_evaluations_of_two_seeds_have_no_game_in_common(tmp_path):
    seeds = []
    for run in make_grid("CartPole-v1", ["a2c"], [0, 1, 2], tmp_path, **SMALL):
        manager = StudyManager(run)
        manager.setup_experiment()
        seeds += next(callback for callback in manager.callbacks if isinstance(callback, EvalCallback)).eval_env._seeds
        for env in manager.envs:
            env.close()
    assert len(seeds) == len(set(seeds)) == 3 * SMALL["n_eval_episodes"]


@pytest.mark.slow
@pytest.mark.parametrize("native", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_evaluation_presses_fire_at_the_start_of_each_life_as_training_does(native, tmp_path):
    """Without, an agent that never learnt to press it would wait for the time limit of the game."""
    (run,) = make_grid("BreakoutNoFrameskip-v4", ["task1"], [3], tmp_path, **{**SMALL, "native": native})
    manager = StudyManager(run)
    model, _ = manager.setup_experiment()
    evaluating = next(callback for callback in manager.callbacks if isinstance(callback, EvalCallback)).eval_env
    agent = Mock(predict=lambda *args, **kwargs: (np.zeros(3, dtype=int), None))
    frames = evaluate_policy(agent, evaluating, 3, return_episode_rewards=True)[1]
    # Without FIRE a game has no ball, and ends after 108,000
    assert len(frames) == 3 and max(frames) < 10_000
    model.env.close()
    evaluating.close()


@pytest.mark.parametrize("algo", ["qppo", "a2c", "pqn"])
def test_a_rollout_is_sent_once_to_a_gpu(algo, tmp_path, monkeypatch):
    (run,) = make_grid("CartPole-v1", [algo], [0], tmp_path, **SMALL)
    with model_of(run) as model:
        assert not isinstance(model.rollout_buffer, DeviceRolloutBuffer)
    # The model itself stays on the CPU
    monkeypatch.setattr("sb3_qac.study.manager.get_device", lambda device: th.device("cuda"))
    with model_of(run) as model:
        assert isinstance(model.rollout_buffer, DeviceRolloutBuffer)
        model.learn(2 * model.n_steps * model.n_envs)


def test_environments_whose_state_cannot_be_seen_are_replayed(tmp_path):
    assert has_visible_state("CartPole-v1", {}) and not has_visible_state("LunarLander-v3", {})
    (run,) = make_grid("LunarLander-v3", ["task1"], [0], tmp_path, **SMALL)
    model, _ = (manager := StudyManager(run)).setup_experiment()
    assert isinstance(model.env.envs[0], EpisodeReplay)
    model.env.close()
    assert manager.needs_replay


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_with_new_episodes_a_run_is_resumed_that_cannot_be_resumed_exactly_and_the_report_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(gym.registry, "Unrepeatable-v0", EnvSpec("Unrepeatable-v0", Unrepeatable))
    options = "--algos qa2c --seeds 0 --steps 2000 --eval-freq 800 --eval-episodes 3 --wandb disabled --device cpu".split()
    command = ["study", "Unrepeatable-v0", *options, "--output", str(tmp_path)]
    folder = tmp_path / "qa2c_seed-0"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 800)
        assert main(command) != 0
    assert main(command) == 1
    assert "or `--new-episodes` to `study`" in (folder / "error.txt").read_text()
    assert not list(warnings_of(load_study(tmp_path)))
    assert main([*command, "--new-episodes"]) == 0
    # The checkpoint is written at the end of the update
    (step,) = read_json(folder / "status.json")["new_episodes_at"]
    assert 800 <= step < 2000
    (warning,) = warnings_of(load_study(tmp_path))
    assert warning.startswith(f"**qa2c_seed-0 was resumed with new episodes** at {step:,} steps")
    # Which is no other run
    assert main(command) == 0


def test_the_table_tells_how_far_each_is(tmp_path):
    runs = make_grid("cartpole", ["task1"], [0, 1, 2], tmp_path)
    status = {"steps": 1000, "total": 3000, "steps_per_second": 10.0, "finished": False}
    status |= {"training_return": 9.876, "last_evaluation": {"steps": 800, "mean_return": 12.345}}
    Path(runs[0].folder).mkdir(parents=True)
    Path(runs[0].folder, "status.json").write_text(json.dumps(status))
    table = status_table(runs, {runs[2].folder: "broken"})
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows[0][0] == "all-action_seed-0" and rows[0][1].percentage_completed == pytest.approx(100 / 3)
    assert rows[0][2:] == ("1,000", "10", "0:03:20", "9.88", "12.35 at 800")
    assert [row[1] for row in rows[1:]] == ["waiting", "failed"]
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    text = console.file.getvalue()
    assert "all-action_seed-0" in text and "12.35 at 800" in text


def test_the_summary_names_the_steps_the_time_and_the_return_of_finished_runs(tmp_path):
    runs = make_grid("cartpole", ["qa2c"], [0, 1, 2, 3], tmp_path, stop_return=475.0)
    for run, finished, mean_return in zip(runs, (True, True, True, False), (480.0, 20.0, None, 480.0), strict=True):
        status = {"steps": 12_000, "seconds": 83.4, "finished": finished}
        status["last_evaluation"] = None if mean_return is None else {"steps": 10_000, "mean_return": mean_return}
        Path(run.folder).mkdir(parents=True)
        Path(run.folder, "status.json").write_text(json.dumps(status))
    evaluated = "12,000 steps in 0:01:23, return {} in the evaluation at 10,000: it {} 475"
    assert list(summary(runs)) == [
        f"{runs[0].folder}: {evaluated.format('480.00', 'reached')}",
        f"{runs[1].folder}: {evaluated.format('20.00', 'did not reach')}",
        f"{runs[2].folder}: 12,000 steps in 0:01:23, no evaluation: it did not reach 475",
    ]


@pytest.mark.parametrize(
    ("arguments", "interrupt", "said"),
    [
        (["study", "cartpole"], "sb3_qac.study.grid.run_study", "study: interrupted; the same command resumes it."),
        (["evaluate", "run"], "sb3_qac.study.agents.evaluate_agent", "evaluate: interrupted."),
    ],
)
def test_after_ctrl_c_a_command_says_so_and_ends_as_shells_expect(arguments, interrupt, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(interrupt, Mock(side_effect=KeyboardInterrupt))
    # 128 and the number of SIGINT
    assert main(arguments) == 130
    # After what a study says before it begins
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_a_study_ends_with_the_commands_that_come_next(tmp_path, offline_wandb, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--algos", "a2c", "--seeds", "0", "--steps", "40", "--eval-episodes", "1", "--output", "my study"]
    assert main(["study", "CartPole-v1", *options, "--wandb", "offline"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "Next: python -m sb3_qac report 'my study'",
        "      python -m sb3_qac video 'my study/a2c_seed-0'",
        "      wandb sync 'my study'/*/wandb/latest-run",
    ]
    assert list(Path("my study").glob("*/wandb/latest-run"))
    # With JSON nothing else is printed
    assert main(["study", "CartPole-v1", *options, "--wandb", "offline", "--json"]) == 0
    assert "Next" not in capsys.readouterr().out


def test_on_a_full_disk_a_command_says_so(monkeypatch, capsys, tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.md")
    monkeypatch.setattr("sb3_qac.study.report.write_report", Mock(side_effect=full))
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "report: the disk is full (report.md). Free some space, and give the command again.\n"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="shells of Windows have no such exit code")
def test_a_command_whose_output_nobody_reads_ends_without_a_traceback():
    command = [sys.executable, "-m", "sb3_qac", "presets"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, error = process.communicate()
    # 128 and the number of SIGPIPE
    assert (process.returncode, error) == (141, "")


def test_the_broken_pipe_of_a_process_that_died_is_an_error(monkeypatch):
    """As that of a worker of ``SubprocVecEnv``."""
    monkeypatch.setattr("runpy.run_module", Mock(side_effect=BrokenPipeError))
    with pytest.raises(BrokenPipeError):
        main(["zoo", "train", "--algo", "qa2c"])


def test_a_command_without_an_output_ends_as_usual(monkeypatch):
    """As one that a service has started: ``sys.stdout`` is None."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["presets", "qa2c"]) == 0


def test_after_ctrl_c_a_study_names_the_runs_that_begin_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sb3_qac.study.grid.run_study", Mock(side_effect=KeyboardInterrupt))
    assert main(["study", "cartpole", "--algos", "qa2c", "dqn", "--output", str(tmp_path)]) == 130
    said = "study: interrupted; the same command resumes it, but unfinished runs of dqn begin again.\n"
    assert capsys.readouterr().err.endswith(said)


def test_after_ctrl_c_runs_whose_preset_cannot_be_resumed_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sb3_qac.study.grid.run_study", Mock(side_effect=KeyboardInterrupt))
    preset = tmp_path / "a2c.yml"
    preset.write_text("Pendulum-v1: {n_timesteps: 100, policy: MlpPolicy, use_sde: true}")
    command = ["study", "Pendulum-v1", "--algos", "a2c", "--conf-file", str(preset), "--output", str(tmp_path / "study")]
    assert main(command) == 130
    assert "but unfinished runs of a2c begin again." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CartPol-v1"], r"Did you mean: `CartPole`\? Short names are ablation"),
        (["Pogn-v4"], "Pogn.*Short names are ablation"),
        (["pong", "--jobs", "0"], "`jobs`"),
        (["pong", "--threads", "0"], "`threads`"),
        (["pong", "--steps", "-5"], "`steps`"),
        (["pong", "--seeds", "-1"], "`seeds` must be an integer, between 0 and 4294967295, but -1"),
        (["pong", "--ray", "nonsense"], "HOST:PORT"),
        (["pong", "--ray", "auto", "--threads", "auto"], "`--threads` must be a number with `--ray`"),
        (["classic", "--dtype", "bfloat16"], "`dtype` is 'bfloat16', but CartPole-v1 is not an Atari game"),
        (["pong", "--stock", "--dtype", "bfloat16"], "`--dtype` is 'bfloat16', but with `--stock`"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, message):
    with pytest.raises(SystemExit, match=f"^study: .*{message}"):
        main(["study", *arguments])


def test_a_number_of_threads_that_is_none_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["study", "cartpole", "--threads", "many"])
    assert "must be a number, or 'auto', but 'many' was given" in capsys.readouterr().err


def test_a_log_file_gets_a_line_when_a_run_ends(tmp_path, capsys, monkeypatch):
    def train(run):
        # What was printed before
        seen.append(capsys.readouterr().err)
        if run.seed == 1:
            return "no memory"
        speed = {"steps_per_second": 4.0, "training_return": None}
        status = {"finished": True, "steps": 200, "total": 200, "seconds": 61, "last_evaluation": None, **speed}
        Path(run.folder).mkdir(parents=True)
        Path(run.folder, "status.json").write_text(json.dumps(status))

    seen = []
    monkeypatch.setattr("sb3_qac.study.grid.train_run", train)
    run_study(make_grid("CartPole-v1", ["a2c"], [0, 1, 2], tmp_path, n_timesteps=200))
    folder = tmp_path / "a2c_seed"
    assert seen == ["", f"{folder}-0: 200 steps in 0:01:01, no evaluation\n", ""]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_file_gets_a_line_of_each_run_that_is_under_way_again_and_again(as_json, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sb3_qac.study.progress.SECONDS", 0.01)
    runs = make_grid("CartPole-v1", ["a2c"], [0, 1, 2], tmp_path, n_timesteps=200)
    status = {"total": 200, "seconds": 10, "finished": False, "last_evaluation": None, "training_return": None}

    def write(run, **values):
        make_folder(Path(run.folder))
        write_atomically(Path(run.folder, "status.json"), json.dumps({**status, **values}).encode())

    # Stopped before, and not resumed yet
    write(runs[2], steps=100, steps_per_second=2.0)

    def train(run):
        if run is runs[0]:
            write(run, steps=50, steps_per_second=0.0)
            time.sleep(0.3)
            write(run, steps=120, steps_per_second=4.0, training_return=21.5, last_evaluation={"steps": 100, "mean_return": 9})
            time.sleep(0.3)
        write(run, steps=200, steps_per_second=4.0, finished=True)

    monkeypatch.setattr("sb3_qac.study.grid.train_run", train)
    run_study(runs, as_json=as_json)
    lines = capsys.readouterr().err.splitlines()
    if as_json:
        found = [json.loads(line) for line in lines if line.startswith("{")]
        assert len(found) > 5 and len(lines) == len(found)
        assert {(Path(x["run"]).name, x["steps"], x["seconds_left"]) for x in found} == {
            ("a2c_seed-0", 50, None),
            # 80 steps, 4 in each second
            ("a2c_seed-0", 120, 20),
            *((f"a2c_seed-{seed}", 200, 0) for seed in range(3)),
        }
    else:
        folder = runs[0].folder
        begun = [line for line in lines if " of 200 steps" in line]
        assert len(begun) > 5 and list(dict.fromkeys(begun)) == [
            f"{folder}: 50 of 200 steps (25%), resuming",
            f"{folder}: 120 of 200 steps (60%), return 21.50, 9.00 in the evaluation at 100, 4 steps/s, 0:00:20 left",
        ]


@pytest.mark.parametrize("finished", [False, True])
def test_a_table_of_many_runs_that_have_ended_or_not_begun_has_no_heading(finished, tmp_path):
    runs = make_grid("CartPole-v1", ["a2c"], range(30), tmp_path)
    status = {"steps": 1, "total": 3, "steps_per_second": 1.0, "finished": True, "last_evaluation": None}
    for run in runs if finished else ():
        make_folder(Path(run.folder)).joinpath("status.json").write_text(json.dumps(status))
    console = Console(width=80, file=io.StringIO())
    console.print(status_table(runs, {}))
    assert console.file.getvalue().split() == f"{30 * finished} of 30 finished".split()


def test_what_a_run_of_a_short_name_takes_is_told_before_it_begins_and_in_the_help(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {study.cost}" in text and "MB" in study.cost for name, study in STUDIES.items())
    monkeypatch.setattr("sb3_qac.study.grid.run_study", Mock(side_effect=KeyboardInterrupt))
    line = f"study: 6 runs. One took {STUDIES['cartpole'].cost}, on one core.\n"
    # With other algorithms or steps that is not known
    for options, told in ([], True), (["--steps", "9000"], False), (["--algos", "qppo"], False):
        main(["study", "cartpole", *options, "--output", str(tmp_path)])
        assert (line in capsys.readouterr().err) == told


def test_help_names_the_studies(capsys):
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    printed = capsys.readouterr().out
    assert "--stop-return" in printed and "minatar" in printed and "all-action-baseline" in printed


def test_the_commit_is_that_of_this_package_only(tmp_path, monkeypatch):
    here = provenance()["commit"]
    assert here is None or re.match("[0-9a-f]{7}", here)
    # Installed inside the repository of another project, which ignores the installed files
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "__init__.py").touch()
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", tmp_path, *identity, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    monkeypatch.setattr(sb3_qac, "__file__", str(tmp_path / "installed" / "__init__.py"))
    assert provenance()["commit"] is None


def test_a_run_names_the_processor_that_trained_it():
    assert provenance()["machine"]["processor"]


def test_a_run_is_trained_where_git_is_not_installed(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert provenance()["commit"] is None


def test_a_preset_for_rl_zoo_may_have_exact_checkpoints_of_its_own(tmp_path):
    """As docs/exact_resume.md recommends for RL Zoo. The study keeps their settings, in a folder of its own."""
    path = tmp_path / "mine.yml"
    callback = "[{sb3_qac.common.callbacks.ExactCheckpointCallback: {save_freq: 100, keep: 99}}]"
    path.write_text(f"CartPole-v1: {{policy: MlpPolicy, n_timesteps: 400, n_steps: 5, n_envs: 4, callback: {callback}}}")
    (run,) = make_grid("CartPole-v1", ["a2c"], [0], tmp_path, str(path), **{**SMALL, "n_timesteps": 400, "eval_freq": 400})
    assert run_study([run]) == {} and run.finished
    # At the start, and every 100 of 400 steps
    assert len(checkpoints_in(Path(run.folder, "checkpoints"))) == 5


# SB3 takes the brackets for a pattern, and finds no earlier log
@pytest.mark.parametrize("name", ["study", "study [1]"])
def test_a_run_that_begins_again_has_no_evaluation_and_no_log_of_the_time_before(name, tmp_path, monkeypatch):
    """DQN cannot be resumed, so it starts from step 0."""
    (run,) = make_grid("CartPole-v1", ["dqn"], [0], tmp_path / name, **SMALL)
    folder = Path(run.folder)
    # In its first steps it writes no row
    for last, evaluations in ((900, [800]), (4, [])):

        def interrupt(callback, last=last):
            if callback.model.num_timesteps == last:
                raise KeyboardInterrupt
            return True

        with monkeypatch.context() as patch:
            patch.setattr(StatusCallback, "_on_step", interrupt)
            train_run(run)
        of_before = [folder / "diagnosis.json", folder / "noise.json", folder / "snapshots" / "0000000800.zip"]
        assert not any(path.exists() for path in of_before)
        assert not run.finished and load_run(Path(run.folder)).timesteps.tolist() == evaluations
        assert Path(run.folder, "best_model.zip").exists() == bool(evaluations)
        assert bool(load_run(Path(run.folder)).curves) == bool(evaluations)
        assert len(list(Path(run.folder, "tensorboard").glob("**/events*"))) == 1
        for path in of_before:
            make_folder(path.parent)
            path.touch()


def test_a_training_does_not_take_statistics_of_the_working_directory(tmp_path, monkeypatch):
    """RL Zoo looks for those of `trained_agent` there, if it has none."""
    with contextlib.closing(VecNormalize(make_vec_env("CartPole-v1"))) as env:
        env.save(str(make_folder(tmp_path / "CartPole-v1") / "vecnormalize.pkl"))
    monkeypatch.chdir(tmp_path)
    (run,) = make_grid("CartPole-v1", ["a2c"], [0], tmp_path / "study", **SMALL)
    with model_of(run) as model:
        assert model.get_vec_normalize_env() is None


def test_a_folder_that_cannot_be_made_does_not_stop_the_other_runs(tmp_path):
    first, second = make_grid("CartPole-v1", ["a2c"], [0, 1], tmp_path, **SMALL)
    Path(first.folder).touch()
    failed = run_study([first, second])
    assert list(failed) == [first.folder] and second.finished


def test_an_error_in_letters_that_the_locale_lacks_does_not_stop_the_other_runs(tmp_path, monkeypatch):
    runs = make_grid("CartPole-v1", ["a2c"], [0, 1], tmp_path, **SMALL)
    monkeypatch.setattr("sb3_qac.study.train._train", Mock(side_effect=FloatingPointError("loss \u2265 0")))
    write_text = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda self, text, encoding="ascii": write_text(self, text, encoding))
    assert run_study(runs) == dict.fromkeys([run.folder for run in runs], "FloatingPointError: loss \u2265 0")


def test_json_of_a_study_has_no_nan(tmp_path, capsys):
    """A training return before the first episode has ended is not a number."""
    arguments = ["study", "CartPole-v1", "--algos", "a2c", "--seeds", "0", "--steps", "40", "--wandb", "disabled", "--json"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    (status,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail).values()
    assert status["finished"]
