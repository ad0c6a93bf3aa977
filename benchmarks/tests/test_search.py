"""A search gives each algorithm the same budget, and everything in it follows from its file."""

import itertools
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from filelock import FileLock
from rl_zoo3.utils import ALGOS

from benchmarks import search as module
from benchmarks.search import SEARCHES, Round, load_search, main
from sb3_qac.study.manager import StudyManager

RESULTS = Path(__file__).parents[2] / "results"
# Two tasks; the fake runs below train nothing
CONTENT = {
    "references": {"CartPole-v1": 100, "Acrobot-v1": 50},
    "eval_freq": 100,
    "eval_episodes": 2,
    "rounds": [{"candidates": 5, "seeds": [0], "steps": 200}, {"candidates": 2, "seeds": [0, 1], "steps": 300}],
    "algorithms": {
        "a2c": {"fixed": {"n_envs": 2}, "space": {"gamma": [0.1, 0.2, 0.3], "ent_coef": [0.0, 0.01], "n_steps": [5, 8]}},
        "large": {"algo": "a2c", "space": {"size": {"8 x 5": {"n_envs": 8, "n_steps": 5}, "4 x 5": {"n_envs": 4}}}},
    },
}


def make_search(folder, **changes):
    path = folder / "mine.yml"
    path.write_text(yaml.safe_dump({**CONTENT, **changes}, sort_keys=False))
    return load_search(path)


class FakeTraining:
    """Instead of runs: the returns are 100 times gamma on CartPole and half of that on Acrobot, one more with seed 1."""

    def __init__(self, fails=(), stop_after=None):
        self.trained, self.fails, self.stop_after = [], fails, stop_after

    def __call__(self, runs, jobs):
        failed = {}
        for run in runs:
            if run.finished:
                continue
            if len(self.trained) == self.stop_after:
                raise KeyboardInterrupt
            gamma = run.hyperparams.get("gamma", 0.0)
            if gamma in self.fails:
                failed[run.folder] = "diverged"
                continue
            self.trained.append((run.env_id, run.seed, run.n_timesteps, gamma))
            mean = (100 * gamma + run.seed) / (1 if run.env_id == "CartPole-v1" else 2)
            folder = Path(run.folder)
            folder.mkdir(parents=True)
            np.savez(
                folder / "evaluations.npz", timesteps=[1, 2, 3], results=[[99.0, 99.0], [mean - 4, mean], [mean + 1, mean + 3]]
            )
            (folder / "run.json").write_text(json.dumps(asdict(run)))
            (folder / "status.json").write_text(json.dumps({"finished": True, "steps": run.n_timesteps, "seconds": 1.5}))
        return failed


@pytest.fixture
def fake(monkeypatch):
    def make(**settings):
        monkeypatch.setattr(module, "run_study", training := FakeTraining(**settings))
        return training

    return make


@pytest.mark.parametrize("name", ["minatar"])
def test_the_search_under_results_had_these_candidates(name):
    """Another default or preset must not change them. QPPO's space had `advantage_scale` too, which QPPO no longer has."""
    kept = yaml.safe_load((RESULTS / f"search_{name}" / "candidates.yml").read_text())
    search = load_search(SEARCHES / f"{name}.yml")
    for algorithm in search.algorithms.keys() - {"qppo", "qppo-sampled"}:
        assert kept[algorithm] == {i: hyperparams for i, (_, hyperparams) in enumerate(search.candidates(algorithm))}


def test_the_first_candidate_is_the_best_setting_that_is_known_and_others_are_drawn_without_repetition(tmp_path):
    algorithms = {"a2c": {**CONTENT["algorithms"]["a2c"], "start": {"learning_rate": 0.5}}}
    first, *drawn = make_search(
        tmp_path, algorithms=algorithms, rounds=[{"candidates": 100, "seeds": [0], "steps": 200}]
    ).candidates("a2c")
    assert first == ({}, {"n_envs": 2, "learning_rate": 0.5})
    space = CONTENT["algorithms"]["a2c"]["space"]
    assert sorted(tuple(choices.values()) for choices, _ in drawn) == sorted(itertools.product(*space.values()))
    assert all(hyperparams == {"n_envs": 2, **choices} for choices, hyperparams in drawn)
    _, *large = make_search(tmp_path).candidates("large")
    assert {choices["size"]: hyperparams for choices, hyperparams in large} == {
        "8 x 5": {"n_envs": 8, "n_steps": 5},
        "4 x 5": {"n_envs": 4},
    }


def test_the_twin_has_the_same_draws_and_differs_in_the_estimator_only(tmp_path):
    for name in ("minatar", "lunarlander"):
        search = load_search(SEARCHES / f"{name}.yml")
        qppo, twin = (search.candidates(algorithm) for algorithm in ("qppo", "qppo-sampled"))
        assert qppo == twin and len(qppo) == 10
    runs, others = (search.runs(algorithm, 1, qppo[3][1], tmp_path) for algorithm in ("qppo", "qppo-sampled"))
    for run, other in zip(runs, others, strict=True):
        assert other.hyperparams == {**run.hyperparams, "policy_gradient": "sampled"}
        assert (other.algo, other.env_id, other.seed, other.n_timesteps) == (run.algo, run.env_id, run.seed, run.n_timesteps)


@pytest.mark.parametrize("name", ["minatar", "lunarlander"])
def test_every_candidate_of_our_searches_is_made_of_arguments(name, tmp_path):
    pytest.importorskip("minatar")
    search = load_search(SEARCHES / f"{name}.yml")
    for algorithm in search.algorithms:
        for _, hyperparams in search.candidates(algorithm)[::8]:
            run = search.runs(algorithm, 1, hyperparams, tmp_path)[0]
            manager = StudyManager(run)
            entries, _, _, _ = manager._preprocess_hyperparams(manager.read_hyperparameters()[0])
            assert isinstance(entries.get("policy_kwargs", {}), dict)
            rollout = manager.n_envs * entries.get("n_steps", 5)
            assert "batch_size" not in entries or rollout % entries["batch_size"] == 0
            assert set(entries) <= set(ALGOS[run.algo].__init__.__annotations__)


def test_the_best_of_a_round_go_to_the_next(tmp_path, fake, capsys):
    training, search = fake(), make_search(tmp_path)
    command = [str(tmp_path / "mine.yml"), "--algos", "a2c", "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert main(command) == 0
    gammas = [hyperparams.get("gamma", 0.0) for _, hyperparams in search.candidates("a2c")]
    # The first drawn of equally good ones
    best = sorted(range(5), key=lambda number: (-gammas[number], number))[:2]
    assert [steps for _, _, steps, _ in training.trained] == [200] * 5 * 2 + [300] * 2 * 2 * 2
    ranks = pd.read_csv(tmp_path / "out" / "search.csv")
    assert ranks["round"].tolist() == [2, 2, 1, 1, 1, 1, 1] and ranks["candidate"].tolist()[:2] == best
    # Of the last two evaluations, relative to 100 and 50, over two seeds of which one returns 1 more
    assert ranks["score"][0] == pytest.approx(gammas[best[0]] + 0.005)
    assert ranks["standard_error"][0] == pytest.approx(0.005)
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed[printed.index("# a2c: candidate") :])["a2c"]["gamma"] == gammas[best[0]]
    # Nothing is trained twice
    assert main(command) == 0 and len(training.trained) == 18


def test_a_search_that_was_stopped_goes_on(tmp_path, fake):
    make_search(tmp_path)
    fake(stop_after=3)
    command = [str(tmp_path / "mine.yml"), "--output", str(tmp_path / "out"), "--device", "cpu"]
    with pytest.raises(SystemExit, match=r"^search: interrupted; the same command goes on\."):
        main(command)
    # The second candidate was half done
    assert len(pd.read_csv(tmp_path / "out" / "search.csv")) == 1
    training = fake()
    assert main(command) == 0
    assert len(training.trained) == 5 * 2 + 3 * 2 - 3 + 2 * 2 * 2 * 2


def test_a_candidate_that_another_process_trains_is_left_to_it(tmp_path, fake, monkeypatch):
    training, search = fake(), make_search(tmp_path)
    each = Round(search, "a2c", 1, tmp_path)
    folder = tmp_path / "round-1" / "a2c" / "00"
    folder.mkdir(parents=True)
    lock = FileLock(folder / "lock")
    lock.acquire()
    monkeypatch.setattr(module.time, "sleep", lambda seconds: lock.release())
    each.train(jobs=1)
    assert len(training.trained) == 10 and [gamma for *_, gamma in training.trained[-2:]] == [0.0, 0.0]


@pytest.mark.slow
def test_several_processes_share_the_candidates(tmp_path):
    """With real runs."""
    make_search(
        tmp_path,
        references={"CartPole-v1": 100},
        rounds=[{"candidates": 3, "seeds": [0], "steps": 200}, {"candidates": 1, "seeds": [0, 1], "steps": 200}],
        algorithms={"qa2c": {"fixed": {"n_envs": 2}, "space": {"gamma": [0.9, 0.8]}}},
    )
    command = [sys.executable, "-m", "benchmarks.search", str(tmp_path / "mine.yml"), "--output", str(tmp_path / "out")]
    processes = [subprocess.Popen([*command, "--device", "cpu"], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed[0] == printed[1] and "# qa2c: candidate" in printed[0]
    assert len(pd.read_csv(tmp_path / "out" / "search.csv")) == 3 + 1
    assert len(list(tmp_path.rglob("evaluations.npz"))) == 3 + 2


def test_a_candidate_with_a_failed_run_has_no_score(tmp_path, fake, capsys):
    search = make_search(tmp_path)
    gammas = [hyperparams.get("gamma", 0.0) for _, hyperparams in search.candidates("a2c")]
    fake(fails=[max(gammas)])
    each = Round(search, "a2c", 1, tmp_path)
    each.train(jobs=1)
    assert {trial.user_attrs["candidate"] for trial in each.standings()} == {i for i in range(5) if gammas[i] != max(gammas)}
    assert "failed, so its candidate has no score: diverged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "entry"),
    [
        ({"seed": 1}, "seed"),
        ({"references": {"CartPole-v1": 100}}, "references"),
        ({"rounds": [{"candidates": 5, "seeds": [1], "steps": 200}]}, "rounds"),
        ({"eval_freq": 50}, "eval_freq"),
        ({"algorithms": {"a2c": {"space": {"gamma": [0.1]}}}}, "algorithms"),
    ],
)
def test_another_search_in_the_folder_is_refused(changes, entry, tmp_path):
    Round(make_search(tmp_path), "a2c", 1, tmp_path)
    with pytest.raises(ValueError, match=f"has a search with other {entry} of a2c. Give another `--output`"):
        Round(make_search(tmp_path, **changes), "a2c", 1, tmp_path)


def changed(algorithm=None, **content):
    return {**CONTENT, **content, **({} if algorithm is None else {"algorithms": {"mine": algorithm}})}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed({"algo": "trpo2", "space": {}}), "There is no algorithm trpo2"),
        (changed({"algo": "a2c", "space": {"clip_range": [1]}}), "mine has the entry 'clip_range'.*argument of A2C"),
        (changed({"algo": "a2c", "space": {}, "fixed": {"gama": 1}}), "the entry 'gama'"),
        (changed({"algo": "a2c", "space": {"a": {"b": {"n_epochs": 1}}}}), "the entry 'n_epochs'"),
        (changed({"algo": "a2c", "space": {"gamma": 0.9}}), "choices of 'gamma' must be a list.*0.9"),
        (changed({"algo": "a2c", "space": {"learning_rate": ["1e-3"]}}), "whose value is the text '1e-3'.*1.0e-3"),
        (changed({"algo": "a2c"}), "missing 1 required positional argument: 'space'"),
        (changed(rounds=[{"candidates": 2, "seeds": [0], "steps": 100}]), "`steps` must be an integer, at least 200, but 100"),
        (changed(rounds=[{"candidates": 2, "seeds": [-1], "steps": 200}]), "`seeds`.*-1"),
        (changed(rounds=[{"candidates": 2, "steps": 200}]), "KeyError: 'seeds'"),
        (changed(references={"CartPole-v1": 0}), "`references: CartPole-v1` must be a finite number, at least 1e-09"),
        (changed(references={"Pogn-v4": 1}), "Pogn"),
        (changed(round=3), "unexpected keyword argument 'round'"),
        ("text", "is no search that can be run"),
    ],
)
def test_what_cannot_be_searched_is_refused_at_the_start(content, message, tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit, match=f"(?s)^search: .*{message}"):
        main([str(path), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pong"], "pong.yml is no search that can be run: FileNotFoundError"),
        (["minatar", "--algos", "trpo", "ppo"], "`algos` must be of a2c, a2c-large, .*, but trpo was given"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, message):
    with pytest.raises(SystemExit, match=f"^search: .*{message}"):
        main(arguments)
