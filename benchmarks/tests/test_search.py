"""A search gives each algorithm the same budget, and everything in it follows from its file."""

import csv
import io
import itertools
import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
import yaml
from rl_zoo3.utils import ALGOS
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike

from benchmarks import search as module
from benchmarks.search import (
    best_as_yaml,
    best_of,
    load_search,
    main,
    run_search,
    search_file,
    standings,
    trials_of,
)
from sb3_qac.common.files import make_folder
from sb3_qac.common.torch_layers import MinAtarCNN
from sb3_qac.study.manager import StudyManager

# Two tasks, of which the fake trainings below make nothing
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


def finish(run, returns, seconds=1.5):
    """Write what a finished training leaves."""
    folder = Path(run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    results = np.array(returns, dtype=float)
    np.savez(folder / "evaluations.npz", timesteps=np.arange(1, len(results) + 1), results=results)
    (folder / "run.json").write_text(json.dumps({**asdict(run), "commit": "abc"}))
    (folder / "status.json").write_text(json.dumps({"finished": True, "steps": run.n_timesteps, "seconds": seconds}))


class FakeTraining:
    """Instead of trainings: the returns are 100 times gamma on CartPole and half of that on Acrobot, one more with seed 1."""

    def __init__(self, fails=(), stop_after=None):
        self.calls, self.fails, self.stop_after = [], fails, stop_after

    def __call__(self, runs, jobs):
        pending = [run for run in runs if not run.finished]
        self.calls.append([(run.name, run.env_id, run.n_timesteps) for run in pending])
        failed = {}
        for i, run in enumerate(pending):
            if i == self.stop_after:
                raise KeyboardInterrupt
            gamma = run.hyperparams.get("gamma", 0.0)
            if gamma in self.fails:
                failed[run.folder] = "diverged"
            else:
                mean = (100 * gamma + run.seed) / (1 if run.env_id == "CartPole-v1" else 2)
                finish(run, [[99.0, 99.0], [mean - 4, mean], [mean + 1, mean + 3]])
        return failed


# ---- candidates ----


def test_the_same_file_gives_the_same_candidates(tmp_path):
    first, again = (make_search(tmp_path).candidates("a2c") for _ in range(2))
    assert first == again and len(first) == 5
    assert first[0].choices == {} and first[0].hyperparams == {"n_envs": 2}
    assert make_search(tmp_path, seed=1).candidates("a2c") != first
    # More in the first round are the same and others
    rounds = [{**CONTENT["rounds"][0], "candidates": 8}]
    assert make_search(tmp_path, rounds=rounds).candidates("a2c")[:5] == first


def test_a_search_starts_from_the_best_setting_that_is_known(tmp_path):
    algorithms = {"a2c": {**CONTENT["algorithms"]["a2c"], "start": {"learning_rate": 0.5}}}
    plain, known = (make_search(tmp_path, **changes).candidates("a2c") for changes in ({}, {"algorithms": algorithms}))
    assert known[0].choices == {"learning_rate": 0.5} and known[0].hyperparams == {"n_envs": 2, "learning_rate": 0.5}
    assert known[1:] == plain[1:]
    with pytest.raises(ValueError, match="'learning_rat', which is neither an argument of A2C"):
        algorithms["a2c"]["start"] = {"learning_rat": 0.5}
        make_search(tmp_path, algorithms=algorithms)


def test_candidates_are_drawn_from_the_grid_without_repetition(tmp_path):
    search = make_search(tmp_path, rounds=[{"candidates": 100, "seeds": [0], "steps": 200}])
    space = CONTENT["algorithms"]["a2c"]["space"]
    drawn = [tuple(candidate.choices.values()) for candidate in search.candidates("a2c")[1:]]
    assert sorted(drawn) == sorted(itertools.product(*space.values()))
    preset, *others = search.candidates("large")
    assert preset.hyperparams == {}
    assert {candidate.choices["size"]: candidate.hyperparams for candidate in others} == {
        "8 x 5": {"n_envs": 8, "n_steps": 5},
        "4 x 5": {"n_envs": 4},
    }


def test_the_twin_has_the_same_draws_and_differs_in_the_estimator_only(tmp_path):
    for name in ("minatar", "lunarlander"):
        search = load_search(search_file(name))
        qppo, twin = (search.candidates(algorithm) for algorithm in ("qppo", "qppo-sampled"))
        assert qppo == twin and len(qppo) == 10
    runs, others = (
        [run for trial in trials_of(search, algorithm, 1, tmp_path) for run in trial.runs]
        for algorithm in ("qppo", "qppo-sampled")
    )
    for run, other in zip(runs, others, strict=True):
        assert other.hyperparams == {**run.hyperparams, "policy_gradient": "sampled"}
        assert (other.algo, other.env_id, other.seed, other.n_timesteps) == (run.algo, run.env_id, run.seed, run.n_timesteps)


# Normalising, or the network of MinAtar, is evaluated without making environments
@pytest.mark.parametrize("name", ["minatar", "lunarlander"])
def test_every_candidate_of_our_searches_is_made_of_arguments(name, tmp_path):
    pytest.importorskip("minatar")
    search = load_search(search_file(name))
    for algorithm in search.algorithms:
        trials = trials_of(search, algorithm, 1, tmp_path)
        assert [len(trial.runs) for trial in trials] == 10 * [len(search.references)]
        for trial in trials:
            manager = StudyManager(trial.runs[0])
            entries, _, _, _ = manager._preprocess_hyperparams(manager.read_hyperparameters()[0])
            assert isinstance(entries.get("policy_kwargs", {}), dict)
            rollout = manager.n_envs * entries.get("n_steps", 5)
            assert "batch_size" not in entries or rollout % entries["batch_size"] == 0
            assert set(entries) <= set(ALGOS[trial.runs[0].algo].__init__.__annotations__)


def test_environments_network_and_schedules_of_a_candidate_replace_those_of_the_preset(tmp_path):
    network = "dict(features_extractor_class=MinAtarCNN, net_arch=[], optimizer_class=RMSpropTFLike)"
    entries = {"n_envs": 3, "learning_rate": "lin_4e-4", "policy_kwargs": network}
    search = make_search(
        tmp_path, references={"MinAtar/Breakout-v1": 1}, algorithms={"a2c": {"fixed": entries, "space": {"gamma": [0.5]}}}
    )
    (run,) = trials_of(search, "a2c", 1, tmp_path)[1].runs
    model, _ = (manager := StudyManager(run)).setup_experiment()
    for env in manager.envs:
        env.close()
    assert model.n_envs == 3 and model.gamma == 0.5 and model.lr_schedule(0.5) == pytest.approx(2e-4)
    assert type(model.policy.optimizer) is RMSpropTFLike and type(model.policy.features_extractor) is MinAtarCNN
    assert not any(isinstance(layer, th.nn.GroupNorm) for layer in model.policy.modules())


# ---- rounds and scores ----


def test_score_is_the_mean_of_the_last_two_evaluations_in_units_of_the_references(tmp_path):
    search = make_search(tmp_path)
    trial = trials_of(search, "a2c", 2, tmp_path)[0]
    assert [(run.env_id, run.seed) for run in trial.runs] == list(itertools.product(CONTENT["references"], [0, 1]))
    assert np.isnan(trial.mean)
    for run, (before, last) in zip(trial.runs, [(80, 120), (60, 60), (20, 30), (45, 55)], strict=True):
        assert np.isnan(trials_of(search, "a2c", 2, tmp_path)[0].mean)
        finish(run, [[1000, 1000], [before - 1, before + 1], [last, last]])
    trial = trials_of(search, "a2c", 2, tmp_path)[0]
    # CartPole's 100 and Acrobot's 50 are 1
    np.testing.assert_allclose(trial.scores, [[1.0, 0.6], [0.5, 1.0]])
    assert trial.mean == pytest.approx(0.775)
    # Over the seeds, which score 0.75 and 0.8
    assert trial.error == pytest.approx(0.025)


def test_a_finished_run_whose_evaluations_are_gone_has_no_score_and_the_table_stands_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "run_study", FakeTraining())
    search = make_search(tmp_path)
    assert run_search(search, ["a2c"], tmp_path) == {}
    scores = {trial.candidate.number: trial.mean for trial in trials_of(search, "a2c", 1, tmp_path)}
    first = trials_of(search, "a2c", 1, tmp_path)[0]
    Path(first.runs[0].folder, "evaluations.npz").unlink()
    assert trials_of(search, "a2c", 1, tmp_path)[0].mean == scores[first.candidate.number]
    (tmp_path / module.RUNS_FILE).unlink()
    assert np.isnan(trials_of(search, "a2c", 1, tmp_path)[0].mean)


def test_the_best_of_a_round_go_to_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "run_study", training := FakeTraining())
    search = make_search(tmp_path)
    assert run_search(search, ["a2c"], tmp_path) == {}
    first, second = training.calls
    assert len(first) == 5 * 2 and {steps for _, _, steps in first} == {200}
    gammas = [candidate.hyperparams.get("gamma", 0.0) for candidate in search.candidates("a2c")]
    # The first drawn of equally good ones
    best = sorted(range(5), key=lambda number: (-gammas[number], number))[:2]
    assert {name for name, _, _ in second} == {f"a2c-{number}_seed-{seed}" for number in best for seed in (0, 1)}
    assert len(second) == 2 * 2 * 2 and {steps for _, _, steps in second} == {300}
    ranks = standings(search, "a2c", tmp_path)
    assert [(trial.candidate.number, trial.round) for trial in ranks[:2]] == [(number, 2) for number in best]
    assert [trial.round for trial in ranks] == [2, 2, 1, 1, 1] and ranks[0].mean == pytest.approx(gammas[best[0]] + 0.005)
    with (tmp_path / "search.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10 + 8
    assert rows[0] == {
        **{"algo": "a2c", "candidate": "0", "round": "1", "env": "CartPole-v1", "seed": "0", "steps": "200"},
        **{"return": "0.0", "score": "0.0", "seconds": "2", "commit": "abc"},
    }
    kept = yaml.safe_load((tmp_path / "candidates.yml").read_text())
    assert kept["a2c"] == {candidate.number: candidate.hyperparams for candidate in search.candidates("a2c")}


def test_the_candidates_can_be_read_while_they_are_trained(tmp_path, monkeypatch):
    search, kept = make_search(tmp_path), []
    monkeypatch.setattr(module, "run_study", lambda runs, jobs: kept.append(module.read_candidates(tmp_path)) or {})
    run_search(search, ["a2c"], tmp_path)
    assert kept[0]["a2c"] == {candidate.number: candidate.hyperparams for candidate in search.candidates("a2c")}


def test_a_candidate_with_a_failed_run_has_no_score(tmp_path, monkeypatch):
    search = make_search(tmp_path)
    gammas = [candidate.hyperparams.get("gamma", 0.0) for candidate in search.candidates("a2c")]
    monkeypatch.setattr(module, "run_study", FakeTraining(fails=[max(gammas)]))
    failed = run_search(search, ["a2c"], tmp_path)
    numbers = [number for number, gamma in enumerate(gammas) if gamma == max(gammas)]
    assert len(failed) == 2 * len(numbers) and all("/a2c/" in path for path in failed)
    best = best_of(trials_of(search, "a2c", 1, tmp_path))
    assert sorted(trial.candidate.number for trial in best) == [number for number in range(5) if number not in numbers]


def test_a_finished_run_of_another_preset_is_refused(tmp_path, monkeypatch):
    search = make_search(tmp_path)
    monkeypatch.setattr(module, "run_study", FakeTraining())
    assert run_search(search, ["a2c"], tmp_path) == {}
    run = trials_of(search, "a2c", 1, tmp_path)[1].runs[0]
    (config := Path(run.folder, run.env_id)).mkdir()
    (config / "config.yml").write_text("!!python/object/apply:collections.OrderedDict\n- - - learning_rate\n    - 0.123\n")
    with pytest.raises(ValueError, match=r"is a finished run with other hyperparameters: .*`learning_rate` is .*0\.123"):
        run_search(search, ["a2c"], tmp_path)


def test_the_best_of_an_earlier_round_is_printed_if_all_of_the_last_failed():
    def trial(number, round_, mean):
        return SimpleNamespace(candidate=SimpleNamespace(number=number, hyperparams={"gamma": 0.9}), round=round_, mean=mean)

    # Candidate 1 was the best of the first round, too
    trials = [trial(1, 1, 0.9), trial(3, 1, 0.5), trial(1, 2, math.nan), trial(2, 2, math.nan)]
    assert best_as_yaml("a2c", trials).startswith("# a2c: candidate 1, score 0.900 in round 1\n")
    assert best_as_yaml("a2c", [*trials, trial(4, 2, 0.1)]).startswith("# a2c: candidate 4, score 0.100 in round 2\n")
    assert best_as_yaml("a2c", [trial(1, 2, math.nan), trial(3, 1, 0.5)]) == (
        "# a2c: candidate 3, score 0.500 in round 1\na2c:\n  gamma: 0.9\n"
    )
    assert best_as_yaml("a2c", [trial(1, 2, math.nan)]) == best_as_yaml("a2c", []) == ""


def test_a_search_that_was_stopped_goes_on(tmp_path, monkeypatch):
    search = make_search(tmp_path)
    monkeypatch.setattr(module, "run_study", FakeTraining(stop_after=3))
    with pytest.raises(KeyboardInterrupt):
        run_search(search, ["a2c", "large"], tmp_path)
    # What was reached is in the table
    assert len((tmp_path / "search.csv").read_text().splitlines()) == 1 + 3
    monkeypatch.setattr(module, "run_study", training := FakeTraining())
    # One algorithm after the other, in the same folder
    assert run_search(search, ["a2c"], tmp_path) == run_search(search, ["large"], tmp_path) == {}
    assert [len(call) for call in training.calls] == [10 - 3, 8, 6, 8]
    before = (tmp_path / "search.csv").read_bytes()
    assert run_search(search, ["a2c", "large"], tmp_path) == {}
    assert training.calls[-2:] == [[], []] and (tmp_path / "search.csv").read_bytes() == before
    assert before.count(b"\n") == 1 + 10 + 8 + 6 + 8


def test_the_table_and_the_candidates_carry_a_search_to_another_machine(tmp_path, monkeypatch):
    search = make_search(tmp_path)
    monkeypatch.setattr(module, "run_study", FakeTraining(stop_after=3))
    with pytest.raises(KeyboardInterrupt):
        run_search(search, ["a2c"], tmp_path / "one")
    (tmp_path / "two").mkdir()
    for name in (module.RUNS_FILE, module.CANDIDATES_FILE):
        shutil.copy(tmp_path / "one" / name, tmp_path / "two")
    for folder in ("one", "two"):
        monkeypatch.setattr(module, "run_study", training := FakeTraining())
        assert run_search(search, ["a2c"], tmp_path / folder) == {}
        assert [len(call) for call in training.calls] == [10 - 3, 8]
    contents = [(tmp_path / folder / module.RUNS_FILE).read_bytes() for folder in ("one", "two")]
    assert contents[0] == contents[1]
    one, two = (standings(search, "a2c", tmp_path / folder) for folder in ("one", "two"))
    assert [(trial.candidate, trial.mean) for trial in one] == [(trial.candidate, trial.mean) for trial in two]


def test_the_search_under_results_can_be_continued():
    """Another default or preset must not change its candidates."""
    kept = Path(__file__).parents[2] / "results" / "search_minatar" / module.CANDIDATES_FILE
    assert module.candidates_as_yaml(load_search(search_file("minatar"))) == kept.read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "a2c, candidate 1, .* has other hyperparameters"),
        ({"references": {"CartPole-v1": 100}}, "Acrobot-v1, seed 0 is not in the search"),
        ({"rounds": [{"candidates": 5, "seeds": [1], "steps": 200}]}, "CartPole-v1, seed 0 is not in the search"),
        ({"rounds": [{"candidates": 5, "seeds": [0], "steps": 400}]}, "seed 0 ended after 200 steps, and has 400"),
        ({"eval_freq": 50}, "had eval_freq 100, and has 50 in"),
        ({"eval_episodes": 3}, "had eval_episodes 2, and has 3 in"),
        (
            {"algorithms": {**CONTENT["algorithms"], "a2c": {**CONTENT["algorithms"]["a2c"], "algo": "ppo"}}},
            "a2c, candidate 0, .* had algo 'a2c', and has 'ppo' in",
        ),
        ({"algorithms": {"large": CONTENT["algorithms"]["large"]}}, "a2c, candidate 0, .* is not in the search"),
    ],
)
def test_the_table_of_another_search_is_refused_and_stays(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(module, "run_study", FakeTraining())
    # Also where a message with % would be formatted
    tmp_path = make_folder(tmp_path / "100% done")
    search = make_search(tmp_path, rounds=CONTENT["rounds"][:1])
    assert run_search(search, ["a2c"], tmp_path) == {}
    shutil.rmtree(tmp_path / "round-1")
    before = [(tmp_path / name).read_bytes() for name in (module.RUNS_FILE, module.CANDIDATES_FILE)]
    other = make_search(tmp_path, **{"rounds": CONTENT["rounds"][:1], **changes})
    with pytest.raises(ValueError, match=f"table of a search with other settings: .*{message}"):
        run_search(other, list(other.algorithms), tmp_path)
    assert before == [(tmp_path / name).read_bytes() for name in (module.RUNS_FILE, module.CANDIDATES_FILE)]


def test_the_table_of_a_search_with_longer_runs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "run_study", FakeTraining())
    assert run_search(make_search(tmp_path, rounds=[{**CONTENT["rounds"][0], "steps": 400}]), ["a2c"], tmp_path) == {}
    shutil.rmtree(tmp_path / "round-1")
    with pytest.raises(ValueError, match=r"candidate 0, round 1, .* had steps 400, and has 200 in the search"):
        run_search(make_search(tmp_path, rounds=CONTENT["rounds"][:1]), ["a2c"], tmp_path)


def test_a_run_that_another_machine_did_not_finish_stays_in_the_table_and_is_trained(tmp_path, monkeypatch):
    search = make_search(tmp_path, rounds=CONTENT["rounds"][:1])
    monkeypatch.setattr(module, "run_study", FakeTraining())
    assert run_search(search, ["a2c"], tmp_path) == {}
    (run,) = tmp_path.glob("round-1/a2c/03/CartPole-v1/*")
    (run / "status.json").write_text(json.dumps({"finished": False, "steps": 100, "seconds": 1}))
    table = tmp_path / module.RUNS_FILE
    table.unlink()
    module.write_search(search, tmp_path)
    unfinished = table.read_text()
    assert "a2c,3,1,CartPole-v1,0,100,,,1," in unfinished
    # On another machine, which has only the two files
    shutil.rmtree(tmp_path / "round-1")
    module.write_search(search, tmp_path)
    assert table.read_text() == unfinished
    monkeypatch.setattr(module, "run_study", training := FakeTraining())
    assert run_search(search, ["a2c"], tmp_path) == {}
    assert training.calls == [[("a2c-3_seed-0", "CartPole-v1", 200)]]
    finished = table.read_text()
    assert ",100,,,1," not in finished
    # Tables of both machines, one after the other: the finished row counts
    (row,) = [line for line in unfinished.splitlines() if ",100,,,1," in line]
    table.write_text(f"{finished}{row}\n")
    module.write_search(search, tmp_path)
    assert table.read_text() == finished


def test_a_run_that_is_unfinished_here_and_finished_in_the_table_is_not_trained_again(tmp_path, monkeypatch):
    search = make_search(tmp_path, rounds=CONTENT["rounds"][:1])
    monkeypatch.setattr(module, "run_study", training := FakeTraining())
    assert run_search(search, ["a2c"], tmp_path) == {}
    before = (tmp_path / module.RUNS_FILE).read_bytes()
    (status,) = tmp_path.glob("round-1/a2c/03/CartPole-v1/*/status.json")
    status.write_text(json.dumps({"finished": False, "steps": 100, "seconds": 1}))
    assert run_search(search, ["a2c"], tmp_path) == {}
    assert training.calls[1:] == [[]] and (tmp_path / module.RUNS_FILE).read_bytes() == before


# The first is a number for pandas, in the second it drops zeros
@pytest.mark.parametrize("commit", ["1234e56", "0012345"])
def test_a_commit_stays_what_it_was_if_it_looks_like_a_number(tmp_path, monkeypatch, commit):
    search = make_search(tmp_path, rounds=CONTENT["rounds"][:1])
    monkeypatch.setattr(module, "run_study", FakeTraining())
    run_search(search, ["a2c"], tmp_path)
    path = tmp_path / module.RUNS_FILE
    path.write_text(before := path.read_text().replace(",abc", f",{commit}"))
    shutil.rmtree(tmp_path / "round-1")
    run_search(search, ["a2c"], tmp_path)
    assert path.read_text() == before


def repeat_with_another_return(text):
    first = text.splitlines()[1].split(",")
    return text + ",".join([*first[:6], "77.0", *first[7:]]) + "\n"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        # The last row is a2c,4,1,Acrobot-v1,0,200,5.0,0.1,2,abc
        (
            module.RUNS_FILE,
            lambda text: text[: text.rindex("0,0.1,2")],
            "table of a search: a row is incomplete.*seconds",
        ),
        (
            module.RUNS_FILE,
            lambda text: text[: text.rindex("2c,4")],
            "table of a search: a row is incomplete.*candidate",
        ),
        (module.RUNS_FILE, lambda text: text * 2, "not the table of a search: .* no number as candidate"),
        (module.RUNS_FILE, lambda text: "text\n", "not the table of a search: it has no column algo"),
        (module.RUNS_FILE, lambda text: text + "1,2,3,4,5,6,7,8,9,10,11\n", "not the table of a search: .*fields"),
        (module.RUNS_FILE, repeat_with_another_return, "two different rows of a2c, 0, 1, CartPole-v1, 0"),
        (module.RUNS_FILE, lambda text: text + "a2c,99,1,CartPole-v1,0,200,1.0,0.01,2,abc\n", "candidate 99.* other hyperp"),
        (module.RUNS_FILE, lambda text: text + "a2c,0,0,CartPole-v1,0,200,1.0,0.01,2,abc\n", "round 0.* not in the search"),
        (module.CANDIDATES_FILE, lambda text: "", "not the file of candidates"),
        (module.CANDIDATES_FILE, lambda text: "a: [1", "not the file of candidates"),
        (module.CANDIDATES_FILE, lambda text: "a2c: 3", "not the file of candidates"),
    ],
)
def test_a_damaged_copy_is_refused_by_name_and_stays(tmp_path, monkeypatch, name, change, message):
    search = make_search(tmp_path, rounds=CONTENT["rounds"][:1])
    monkeypatch.setattr(module, "run_study", training := FakeTraining())
    run_search(search, ["a2c"], tmp_path)
    shutil.rmtree(tmp_path / "round-1")
    path = tmp_path / name
    path.write_text(damaged := change(path.read_text()))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        run_search(search, ["a2c"], tmp_path)
    assert path.read_text() == damaged and len(training.calls) == 1


def test_a_table_without_its_candidates_is_refused(tmp_path, monkeypatch):
    search = make_search(tmp_path, rounds=CONTENT["rounds"][:1])
    monkeypatch.setattr(module, "run_study", FakeTraining())
    run_search(search, ["a2c"], tmp_path)
    shutil.rmtree(tmp_path / "round-1")
    (tmp_path / module.CANDIDATES_FILE).unlink()
    with pytest.raises(ValueError, match=r"has search\.csv, but no candidates\.yml.*Add that file, or choose another"):
        run_search(search, ["a2c"], tmp_path)


def test_a_search_begins_with_an_empty_table_and_with_older_candidates(tmp_path, monkeypatch):
    search = make_search(tmp_path, rounds=CONTENT["rounds"][:1])
    for text in ("", "\n", ",".join(module.COLUMNS) + "\n"):
        (tmp_path / module.RUNS_FILE).write_text(text)
        monkeypatch.setattr(module, "run_study", training := FakeTraining(stop_after=0))
        with pytest.raises(KeyboardInterrupt):
            run_search(search, ["a2c"], tmp_path)
        assert len(training.calls[0]) == 10
    monkeypatch.setattr(module, "run_study", training := FakeTraining())
    run_search(search, ["a2c"], tmp_path)
    shutil.rmtree(tmp_path / "round-1")
    path = tmp_path / module.CANDIDATES_FILE
    content = yaml.safe_load(path.read_text())
    del content["search"]
    path.write_text(yaml.safe_dump(content))
    assert run_search(search, ["a2c"], tmp_path) == {} and [len(call) for call in training.calls] == [10, 0]


# ---- the command ----


def content_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def test_a_search_that_is_refused_leaves_the_files_of_the_other(tmp_path, monkeypatch):
    def train(runs, jobs):
        for run in runs:
            finish(run, [[1.0]])
        return {}

    monkeypatch.setattr(module, "run_study", train)
    run_search(make_search(tmp_path), ["a2c", "large"], tmp_path / "out")
    before = [(tmp_path / "out" / name).read_bytes() for name in (module.CANDIDATES_FILE, module.RUNS_FILE)]
    changes = {"large": {"algo": "a2c", "space": {"n_envs": [3]}}}
    other = make_search(tmp_path, algorithms={**CONTENT["algorithms"], **changes})
    # Also if only another algorithm has changed
    for names in (["large"], ["a2c"]):
        with pytest.raises(ValueError, match=r"run with other settings.*large"):
            run_search(other, names, tmp_path / "out")
    assert before == [(tmp_path / "out" / name).read_bytes() for name in (module.CANDIDATES_FILE, module.RUNS_FILE)]


def test_the_command_searches_on_environments_of_ones_own(tmp_path, monkeypatch):
    """The module is known to every run, so that the processes of ``--jobs`` import it too."""
    (tmp_path / "searched_package.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('SearchedCartPole-v0', CartPoleEnv, max_episode_steps=50)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    make_search(tmp_path, references={"SearchedCartPole-v0": 100})
    trained = []

    def train(runs, jobs):
        trained.extend(runs)
        for run in runs:
            finish(run, [[1.0], [1.0]])
        return {}

    monkeypatch.setattr(module, "run_study", train)
    command = ["own", "--conf-file", str(tmp_path / "mine.yml"), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="`--gym-packages` imports the module that registers"):
        main(command)
    with pytest.raises(SystemExit, match="search: `--gym-packages` must be modules that Python can import, but 'nowhere' was"):
        main([*command, "--gym-packages", "nowhere"])
    assert trained == []
    for _ in range(2):
        assert main([*command, "--gym-packages", "searched_package"]) == 0
    # 5 and 2 candidates of `a2c`, the latter with two seeds; `large` has only three
    assert len(trained) == 5 + 2 * 2 + 3 + 2 * 2 and all(run.gym_packages == ["searched_package"] for run in trained)


def test_the_command_trains_and_prints_the_scores_and_runs_nothing_twice(tmp_path, capsys):
    """With real trainings, of which one fails: there are no two actions of which CartPole's steps could be discounted so."""
    search = make_search(
        tmp_path,
        references={"CartPole-v1": 100},
        rounds=[{"candidates": 3, "seeds": [0], "steps": 200}, {"candidates": 1, "seeds": [0, 1], "steps": 200}],
        algorithms={"qa2c": {"fixed": {"n_envs": 2}, "space": {"gamma": [0.9, -1]}}},
    )
    numbers = {candidate.choices.get("gamma"): candidate.number for candidate in search.candidates("qa2c")}
    command = [
        "own",
        "--conf-file",
        str(tmp_path / "mine.yml"),
        "--output",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    assert main([*command, "--json"]) == 1
    printed = capsys.readouterr()
    assert f"round-1/qa2c/{numbers[-1]:02}/CartPole-v1/qa2c_seed-0 failed" in printed.err and "`gamma`" in printed.err
    rows = json.loads(printed.out)["qa2c"]
    assert [row["round"] for row in rows] == [2, 1, 1] and rows[0]["score"] > rows[1]["score"] - 1
    assert rows[0]["CartPole-v1"] == rows[0]["score"] > 0 and rows[0]["standard_error"] >= 0
    assert rows[2]["candidate"] == numbers[-1] and rows[2]["score"] is None
    results = np.load(tmp_path / "out/round-1/qa2c/00/CartPole-v1/qa2c_seed-0/evaluations.npz")["results"]
    assert results.shape == (2, 2)
    of_preset = next(row for row in trials_of(search, "qa2c", 1, tmp_path / "out") if row.candidate.number == 0)
    assert of_preset.mean == pytest.approx(results.mean() / 100)

    finished = content_of(tmp_path / "out")
    failing = tmp_path / "out" / "round-1" / "qa2c" / f"{numbers[-1]:02}"
    assert main(command) == 1
    again = content_of(tmp_path / "out")
    assert {path: x for path, x in again.items() if failing not in path.parents} == {
        path: x for path, x in finished.items() if failing not in path.parents
    }
    printed, progress = capsys.readouterr()
    # The failed run of the first round again, and nothing of the second
    assert progress.count("of 1 finished") == 1 and "0 of 0" not in progress
    assert "the preset" in printed and "gamma 0.9" in printed
    best = yaml.safe_load(io.StringIO(printed[printed.index("# qa2c: candidate") :]))
    assert best == {"qa2c": rows[0]["hyperparams"]}


def changed(algorithm=None, **content):
    return {**CONTENT, **content, **({} if algorithm is None else {"algorithms": {"mine": algorithm}})}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed({"algo": "trpo2", "space": {}}), "mine is one of 'trpo2', which is no algorithm. There are .*qppo-sampled"),
        (changed({"algo": "a2c", "space": {"clip_range": [1]}}), "mine has the entry 'clip_range'.*argument of A2C"),
        (changed({"algo": "a2c", "space": {}, "fixed": {"gama": 1}}), "the entry 'gama'"),
        (changed({"algo": "a2c", "space": {"a": {"b": {"n_epochs": 1}}}}), "the entry 'n_epochs'"),
        (changed({"algo": "a2c", "space": {"gamma": 0.9}}), "choices of 'gamma' must be a list.*0.9"),
        (changed({"algo": "a2c", "space": {"gamma": []}}), "choices of 'gamma' must be a list"),
        (changed({"algo": "a2c", "space": {"size": {"big": 3}}}), "choices of 'size'.*'big': 3"),
        (
            changed({"algo": "a2c", "space": {"learning_rate": ["1e-3"]}}),
            "'learning_rate', whose value is the text '1e-3'.*1.0e-3",
        ),
        (changed({"algo": "a2c", "space": {"seed": [1]}}), "mine has the entry 'seed'.*neither an argument"),
        (changed({"algo": "a2c", "space": ["gamma"]}), r"`space` of mine must be a mapping of entries, but \['gamma'\] was"),
        (changed({"algo": ["a2c"], "space": {}}), r"`algo` of mine must be the name of an algorithm, but \['a2c'\] was"),
        ({**CONTENT, "algorithms": {"mine": None}}, "Algorithm must be a mapping of its entries, but None was given"),
        (changed(rounds=[5]), "Round must be a mapping of its entries, but 5 was given"),
        (changed({"algo": "a2c"}), "is not the file of a search: Algorithm has no entry 'space', which it needs"),
        ({**CONTENT, "algorithms": {"search": CONTENT["algorithms"]["a2c"]}}, "another name than 'search'"),
        (changed(references={"CartPole-v1": 0}), "reference return of CartPole-v1 is 0"),
        (changed(references={"Pogn-v4": 1}), "Pogn"),
        (changed(references={1: 2}), "the names in `references` must be text, but 1 was given"),
        ({**CONTENT, "algorithms": {1: {"space": {}}}}, "the names in `algorithms` must be text, but 1 was given"),
        (changed(references={"classic": 100}), "classic is the name of a study. Name its own: CartPole-v1, Acrobot-v1"),
        (changed(rounds=[{"candidates": 2, "seeds": [0], "steps": 100}]), "`steps` must be an integer, at least 200, but 100"),
        (changed(rounds=[{"candidates": 2, "seeds": [-1], "steps": 200}]), "`seeds`.*-1"),
        (changed(rounds=[{"candidates": 0, "seeds": [0], "steps": 200}]), "`candidates`.*0"),
        (changed(rounds=[{"candidates": 2, "seeds": 0, "steps": 200}]), "`seeds` of a round must be a list .*but 0"),
        (changed(rounds=3), "is not the file of a search: `rounds` must be a list, but 3 was given"),
        (changed(references=["CartPole-v1"]), "`references` must be a mapping of names, but .'CartPole-v1'"),
        (changed(rounds=[{"candidates": 2, "seeds": [], "steps": 200}]), "at least one seed"),
        (changed(rounds=[]), "at least one round"),
        (changed(references={}), "at least one reference"),
        (changed(seed=1.5), "`seed` must be an integer, between 0 and 4294967295, but 1.5"),
        ({**CONTENT, "algorithms": {}}, "at least one algorithm"),
        (changed(round=3), "Search has no entry 'round'. Its entries are references, rounds"),
        (changed(rounds=[{"candidate": 2, "seeds": [0], "steps": 200}]), "Round has no entry 'candidate'. Its entries are"),
        (changed(rounds=[{"candidates": 2, "steps": 200}]), "Round has no entry 'seeds', which it needs"),
        (None, "has no entries, such as `references`"),
        ({"rounds": []}, "has no entry 'algorithms'"),
        ("text", "is not the file of a search"),
    ],
)
def test_what_cannot_be_searched_is_refused_at_the_start_by_name(content, message, tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit, match=f"(?s)^search: .*{message}"):
        main(["own", "--conf-file", str(path), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pong"], "no search 'pong'. There are lunarlander, minatar; `--conf-file`"),
        (["own", "--conf-file", "nowhere.yml"], "There is no file nowhere.yml"),
        (
            ["minatar", "--algos", "trpo", "ppo"],
            "has no algorithm trpo. It has a2c, a2c-large, qa2c, ppo, qppo, qppo-sampled, pqn",
        ),
        (["minatar", "--jobs", "0"], "`jobs`"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, message):
    with pytest.raises(SystemExit, match=f"^search: .*{message}"):
        main([*arguments])
