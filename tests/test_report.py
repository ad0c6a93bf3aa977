"""The report of a study, from folders that are written here, so that every number in it is known."""

import json
import subprocess
import sys

import numpy as np
import pytest

from sb3_qac.study.report import load_study, pooled, standard_error, table, write_report


def write_run(folder, group, seed, returns, finished=True, steps_per_second=100.0, curves=True):
    """:param returns: Returns of an evaluation every 1,000 steps, shape (n_evaluations, n_episodes)"""
    run = folder / f"{group}_seed-{seed}"
    run.mkdir(parents=True)
    settings = dict(name=run.name, group=group, seed=seed, env_id="Game-v0", n_eval_episodes=2, deterministic=False)
    settings.update(versions={"python": "3"}, commit="abc", machine={"cores": 2, "gpu": None})
    (run / "run.json").write_text(json.dumps(settings))
    steps = 1000 * len(returns)
    status = dict(steps=steps, total=3000, seconds=steps / steps_per_second, finished=finished)
    (run / "status.json").write_text(json.dumps(status))
    if len(returns):
        timesteps = 1000 * np.arange(1, len(returns) + 1)
        np.savez(run / "evaluations.npz", timesteps=timesteps, results=np.array(returns, dtype=float))
    if curves:
        (run / "curves.csv").write_text("step,rollout/ep_rew_mean,train/value_loss\n500,1.5,\n1000,2.5,0.1\n")
    return run


@pytest.fixture
def study(tmp_path):
    write_run(tmp_path, "a2c", 0, [[0, 2], [10, 12]])
    write_run(tmp_path, "a2c", 1, [[4, 6], [16, 24]])
    write_run(tmp_path, "task1", 0, [[1, 1], [18, 18], [30, 34]])
    write_run(tmp_path, "task1", 1, [[3, 3], [20, 28], [20, 22]], finished=False, curves=False)
    return tmp_path


def test_groups_hold_their_seeds_in_order(study):
    groups = load_study(study)
    assert {group: [record.name for record in records] for group, records in groups.items()} == {
        "a2c": ["a2c_seed-0", "a2c_seed-1"],
        "task1": ["task1_seed-0", "task1_seed-1"],
    }
    assert groups["a2c"][0].curves["rollout/ep_rew_mean"].to_dict() == {500: 1.5, 1000: 2.5}
    assert groups["a2c"][0].curves["train/value_loss"].to_dict() == {1000: 0.1}


def test_the_mean_is_over_the_episodes_of_all_seeds_with_its_standard_error(study):
    steps, means, errors = pooled(load_study(study)["a2c"])
    assert steps.tolist() == [1000, 2000]
    # 0, 2, 4, 6: mean 3, variance (9 + 1 + 1 + 9) / 3, over 4 episodes; 10, 12, 16, 24: mean 15.5
    np.testing.assert_allclose(means, [3, 15.5])
    np.testing.assert_allclose(errors[0], np.sqrt(20 / 3 / 4))
    assert np.isnan(standard_error(np.array([1.0])))


def test_a_run_that_is_behind_is_not_made_up(tmp_path):
    write_run(tmp_path, "a2c", 0, [[0, 2], [10, 12]])
    write_run(tmp_path, "a2c", 1, [[4, 6]], finished=False)
    steps, means, _ = pooled(load_study(tmp_path)["a2c"])
    assert steps.tolist() == [1000] and means.tolist() == [3]


def test_the_table_has_last_best_and_the_way_to_the_goal(study):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(load_study(study), goal=18)][2:]
    by_name = {row[0]: row[1:] for row in rows}
    # (10, 12): standard deviation sqrt 2 over sqrt 2 episodes is 1
    assert by_name["a2c_seed-0"] == [
        "finished",
        "2,000",
        "11.00 +/- 1.00",
        "11.00 +/- 1.00 at 2,000",
        "not reached",
        "-",
        "100",
    ]
    # 18 at step 2,000, at 100 steps per second: 20 seconds are 0.0056 hours
    assert by_name["task1_seed-0"] == [
        "finished",
        "3,000",
        "32.00 +/- 2.00",
        "32.00 +/- 2.00 at 3,000",
        "2,000",
        "0.0056",
        "100",
    ]
    assert by_name["task1_seed-1"][:4] == ["unfinished", "3,000", "21.00 +/- 1.00", "24.00 +/- 4.00 at 2,000"]


def test_the_report_is_there_in_every_form(study):
    text = write_report(study, goal=18).read_text()
    assert "**Unfinished:** task1_seed-1." in text
    # At the last common evaluation a2c has 11 and 20, task1 18 and 24; of the four pairs three are won by task1
    assert (
        "At 2,000 steps" in text
        and "| a2c | 15.50 | 11.00 to 20.00 |" in text
        and "| task1 | 21.00 | 18.00 to 24.00 |" in text
    )
    assert "| task1 over a2c | 0.75 |" in text
    assert "An interval over 2 seeds says little" in text
    for name in ("evaluations", "curves"):
        for suffix in (".png", ".svg"):
            assert (study / name).with_suffix(suffix).stat().st_size > 10_000
    html = (study / "report.html").read_text()
    assert html.count("<table>") == 3 and "evaluations.png" in html


def test_a_study_that_has_just_begun_has_a_report(tmp_path):
    write_run(tmp_path, "task1", 0, [], finished=False, curves=False)
    text = write_report(tmp_path, output=tmp_path / "report").read_text()
    assert "| task1_seed-0 | unfinished | 0 | - | - | not reached | - | nan |" in text
    assert "No evaluation yet that all runs have" in text


def test_one_seed_gives_no_interval(tmp_path):
    write_run(tmp_path, "task1", 0, [[1, 2]])
    assert "One seed gives no interval." in write_report(tmp_path).read_text()


def test_a_folder_without_a_study_is_refused(tmp_path):
    result = subprocess.run([sys.executable, "-m", "sb3_qac", "report", str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 1 and "There is no run of a study in" in result.stderr and "Traceback" not in result.stderr
