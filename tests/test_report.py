"""The report of a study, from folders that are written here, so that every number in it is known."""

import dataclasses
import json
import math
import shutil
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rliable import library, metrics
from stable_baselines3.common.logger import TensorBoardOutputFormat

from benchmarks import pack
from benchmarks.pack import load_everything
from sb3_qac.__main__ import main
from sb3_qac.study.analysis import differences, relative_table, runs_table, statistics
from sb3_qac.study.catalogue import field_name
from sb3_qac.study.loading import load_study
from sb3_qac.study.records import CURVES
from sb3_qac.study.report import (
    _styles,
    draw_curves,
    draw_evaluations,
    markdown,
    median_curve,
    warnings_of,
    write_report,
)
from sb3_qac.study.statistics import (
    bootstrap,
    common_evaluations,
    difference,
    interquartile_mean,
    planned_steps,
    pooled,
    probability_of_improvement,
    relative_returns,
    standard_error,
)

pytestmark = pytest.mark.usefixtures("quick_bootstrap")


def write_run(
    folder, group, seed, returns, finished=True, steps_per_second=100.0, curves=True, env_id="Game-v0", every=1000, **other
):
    """:param returns: Returns of an evaluation at ``every`` so many steps, shape (n_evaluations, n_episodes)"""
    run = folder / f"{group}_seed-{seed}"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "run.json").write_text("{}")
    settings = dict(name=run.name, group=group, seed=seed, env_id=env_id, n_eval_episodes=2, deterministic=False)
    settings.update(versions={"python": "3"}, commit="abc", machine={"cores": 2, "gpu": None}, **other)
    (run / "run.json").write_text(json.dumps(settings))
    steps = every * len(returns)
    status = dict(steps=steps, total=3000, seconds=steps / steps_per_second, finished=finished)
    (run / "status.json").write_text(json.dumps(status))
    if len(returns):
        timesteps = every * np.arange(1, len(returns) + 1)
        np.savez(run / "evaluations.npz", timesteps=timesteps, results=np.array(returns, dtype=float))
    if curves:
        (run / "curves.csv").write_text("step,rollout/ep_rew_mean,train/entropy_loss\n500,1.5,\n1000,2.5,-0.5\n")
    return run


def text_of(folder, goal=None, reference=None):
    """The text of a report, without its plots, which take most of the time."""
    envs = load_study(folder)
    return markdown(envs, goal, None if reference is None else relative_returns(envs, field_name(reference)))


@pytest.fixture
def study(tmp_path):
    write_run(tmp_path, "a2c", 0, [[0, 2], [10, 12]])
    write_run(tmp_path, "a2c", 1, [[4, 6], [16, 24]])
    write_run(tmp_path, "task1", 0, [[1, 1], [18, 18], [30, 34]])
    write_run(tmp_path, "task1", 1, [[3, 3], [20, 28], [20, 22]], finished=False, curves=False)
    return tmp_path


def test_a_report_tells_that_evaluations_began_late(tmp_path):
    write_run(tmp_path, "a2c", 0, [], eval_from=15.0)
    assert "`--eval-from` there were no evaluations" in text_of(tmp_path)
    write_run(tmp_path / "other", "a2c", 1, [[4, 6]])
    assert "--eval-from" not in markdown(load_study(tmp_path / "other"), None)


def test_groups_hold_their_seeds_in_order(study):
    groups = load_study(study)["Game-v0"]
    assert {group: [record.name for record in records] for group, records in groups.items()} == {
        "a2c": ["a2c_seed-0", "a2c_seed-1"],
        # Under the field's name
        "all-action": ["all-action_seed-0", "all-action_seed-1"],
    }
    assert groups["a2c"][0].curves["rollout/ep_rew_mean"].to_dict() == {500: 1.5, 1000: 2.5}
    assert groups["a2c"][0].curves["train/entropy_loss"].to_dict() == {1000: -0.5}


def test_ppos_policy_loss_is_drawn_as_that_of_the_others(tmp_path):
    """SB3's PPO logs it by another name."""
    run = write_run(tmp_path, "ppo", 0, [[1, 2]], curves=False)
    writer = TensorBoardOutputFormat(str(run / "tensorboard" / "PPO_1"))
    writer.write({"train/policy_gradient_loss": -0.25}, {"train/policy_gradient_loss": ()}, step=100)
    writer.close()
    (record,) = load_study(tmp_path)["Game-v0"]["ppo"]
    assert record.curves["train/policy_loss"].to_dict() == {100: -0.25}


def test_a_study_can_be_read_where_its_curves_cannot_be_kept(tmp_path, monkeypatch):
    run = write_run(tmp_path, "a2c", 0, [[1, 2]], curves=False)
    writer = TensorBoardOutputFormat(str(run / "tensorboard" / "A2C_1"))
    writer.write({"rollout/ep_rew_mean": 1 / 3}, {"rollout/ep_rew_mean": ()}, step=100)
    writer.close()
    with monkeypatch.context() as patch:
        patch.setattr("sb3_qac.study.loading.write_atomically", Mock(side_effect=PermissionError))
        read = load_study(tmp_path)["Game-v0"]["a2c"][0].curves
    assert not (run / "curves.csv").exists()
    # The same digits as where they can be kept
    kept = load_study(tmp_path)["Game-v0"]["a2c"][0].curves
    assert (run / "curves.csv").is_file()
    assert {tag: curve.to_dict() for tag, curve in read.items()} == {tag: curve.to_dict() for tag, curve in kept.items()}


def test_the_curves_are_those_of_the_last_attempt(tmp_path):
    """An algorithm that cannot be resumed begins again in a new folder. The tenth comes after the ninth."""
    run = write_run(tmp_path, "dqn", 0, [[1, 2]], curves=False)
    for attempt in range(1, 11):
        writer = TensorBoardOutputFormat(str(run / "tensorboard" / f"DQN_{attempt}"))
        rows = {"rollout/ep_rew_mean": float(attempt)} | ({"train/value_loss": 1.0} if attempt == 9 else {})
        writer.write(rows, dict.fromkeys(rows, ()), step=100)
        writer.close()
    # Nor is an attempt completed with what an earlier one has, or replaced by one that has no row yet
    (run / "tensorboard" / "DQN_11").mkdir()
    TensorBoardOutputFormat(str(run / "tensorboard" / "DQN_11")).close()
    (record,) = load_study(tmp_path)["Game-v0"]["dqn"]
    assert {tag: curve.to_dict() for tag, curve in record.curves.items()} == {"rollout/ep_rew_mean": {100: 10}}


def test_the_mean_is_over_the_episodes_of_all_seeds_with_its_standard_error(study):
    steps, means, errors = pooled(load_study(study)["Game-v0"]["a2c"])
    assert steps.tolist() == [1000, 2000]
    # 0, 2, 4, 6: mean 3, variance (9 + 1 + 1 + 9) / 3, over 4 episodes; 10, 12, 16, 24: mean 15.5
    np.testing.assert_allclose(means, [3, 15.5])
    np.testing.assert_allclose(errors[0], np.sqrt(20 / 3 / 4))
    assert np.isnan(standard_error(np.array([1.0])))


def test_a_run_that_is_behind_is_not_made_up(tmp_path):
    write_run(tmp_path, "a2c", 0, [[0, 2], [10, 12]])
    write_run(tmp_path, "a2c", 1, [[4, 6]], finished=False)
    steps, means, _ = pooled(load_study(tmp_path)["Game-v0"]["a2c"])
    assert steps.tolist() == [1000] and means.tolist() == [3]


def test_a_run_without_an_evaluation_does_not_hide_the_others(tmp_path, monkeypatch):
    """It was just begun, or failed before its first evaluation."""
    write_run(tmp_path, "a2c", 0, [[0, 2], [10, 12]])
    write_run(tmp_path, "a2c", 1, [[4, 6], [16, 24]])
    write_run(tmp_path, "a2c", 2, [], finished=False)
    envs = load_study(tmp_path)
    steps, means, _ = pooled(envs["Game-v0"]["a2c"])
    assert steps.tolist() == [1000, 2000] and means.tolist() == [3, 15.5]
    figures = []
    monkeypatch.setattr("sb3_qac.study.report.save_figure", lambda figure, path: figures.append(figure))
    draw_evaluations(envs, tmp_path / "evaluations")
    (panel,) = figures[0].axes
    assert len(panel.get_lines()) == 4
    assert [len(found) for found in pooled(envs["Game-v0"]["a2c"][2:])] == [0, 0, 0]


def test_a_run_that_failed_does_not_end_the_mean_of_the_others(tmp_path):
    write_run(tmp_path, "a2c", 0, [[0, 2], [10, 12]])
    (write_run(tmp_path, "a2c", 1, [[4, 6]], finished=False) / "error.txt").write_text("broken")
    steps, means, _ = pooled(load_study(tmp_path)["Game-v0"]["a2c"])
    # 1 and 5, then 11 and 5
    assert steps.tolist() == [1000, 2000] and means.tolist() == [3, 8]


@pytest.mark.parametrize("n_evaluations", [1, 2])
def test_a_single_evaluation_is_drawn_as_a_point(n_evaluations, tmp_path, monkeypatch):
    for seed in (0, 1):
        write_run(tmp_path, "a2c", seed, [[0, 2], [10, 12]][:n_evaluations])
    figures = []
    monkeypatch.setattr("sb3_qac.study.report.save_figure", lambda figure, path: figures.append(figure))
    draw_evaluations(load_study(tmp_path), tmp_path / "evaluations")
    (panel,) = figures[0].axes
    # Two seeds and their mean
    assert [line.get_marker() == "o" for line in panel.get_lines()] == 3 * [n_evaluations == 1]


def test_curves_have_titles_and_steps_where_the_first_or_last_environment_has_none(tmp_path, monkeypatch):
    for env_id in ("A-v0", "B-v0", "C-v0"):
        write_run(tmp_path / env_id, "a2c", 0, [[0, 2]], env_id=env_id, curves=env_id == "B-v0")
    figures = []
    monkeypatch.setattr("sb3_qac.study.report.save_figure", lambda figure, path: figures.append(figure))
    draw_curves(load_study(tmp_path), tmp_path / "curves")
    drawn = [panel for panel in figures[0].axes if panel.get_visible()]
    # The file of curves has the return in training and the entropy
    titles = [CURVES[tag] for tag in ("rollout/ep_rew_mean", "train/entropy_loss")]
    assert [panel.get_title() for panel in drawn] == titles
    assert [panel.get_xlabel() for panel in drawn] == 2 * ["environment steps"]
    assert [panel.get_ylabel() for panel in drawn] == ["B-v0", ""]


def test_labels_of_environments_with_long_names_do_not_overlap(tmp_path, monkeypatch):
    for env_id in ("BreakoutNoFrameskip-v4", "SpaceInvadersNoFrameskip-v4"):
        write_run(tmp_path / env_id, "a2c", 0, [[0, 2]], env_id=env_id)
    figures = []
    monkeypatch.setattr("sb3_qac.study.report.save_figure", lambda figure, path: figures.append(figure))
    draw_curves(load_study(tmp_path), tmp_path / "curves")
    figures[0].draw_without_rendering()
    upper, lower = [panel.yaxis.label.get_window_extent() for panel in figures[0].axes if panel.get_ylabel()]
    assert upper.y0 > lower.y1


def test_all_panels_have_one_legend(tmp_path, monkeypatch):
    for env_id, group in ("First-v0", "a2c"), ("Second-v0", "a2c"), ("Second-v0", "qppo"):
        write_run(tmp_path / env_id, group, 0, [[0, 2], [10, 12]], env_id=env_id)
    figures = []
    monkeypatch.setattr("sb3_qac.study.report.save_figure", lambda figure, path: figures.append(figure))
    for draw in draw_evaluations, draw_curves:
        draw(load_study(tmp_path), tmp_path / "plot")
        (legend,) = figures[-1].legends
        assert [text.get_text() for text in legend.get_texts()] == ["a2c", "qppo"]


def test_a_run_that_was_stopped_counts_with_its_last_evaluation_in_the_mean(tmp_path):
    write_run(tmp_path, "a2c", 0, [[0, 2], [18, 20]], stop_return=18)
    write_run(tmp_path, "a2c", 1, [[4, 6], [10, 12], [14, 18]], stop_return=18)
    steps, means, _ = pooled(load_study(tmp_path)["Game-v0"]["a2c"])
    # 19 and 11, then 19 and 16
    assert steps.tolist() == [1000, 2000, 3000] and means.tolist() == [3, 15, 17.5]


def test_the_evaluation_that_stopped_a_run_is_not_compared(tmp_path):
    write_run(tmp_path, "a2c", 0, [[0, 2], [18, 20]], stop_return=18)
    write_run(tmp_path, "task1", 0, [[4, 6], [10, 12], [14, 18]], stop_return=18)
    compared = common_evaluations(load_study(tmp_path)["Game-v0"])
    assert {group: [record.timesteps.tolist() for record in records] for group, records in compared.items()} == {
        "a2c": [[1000]],
        "all-action": [[1000]],
    }
    assert list(differences(load_study(tmp_path)["Game-v0"], goal=None))[-1] == "| all-action minus a2c | 1,000 | +4 | +4 |"


def test_a_report_of_a_run_that_its_first_evaluation_stopped_says_why_it_has_no_statistics(tmp_path):
    write_run(tmp_path, "qppo", 0, [[18, 20]], stop_return=18)
    text = " ".join(statistics(load_study(tmp_path)["Game-v0"]))
    assert "The one at which a run was stopped does not count, since it was selected for its return" in text


def test_evaluations_that_were_planned_for_the_same_steps_are_compared(tmp_path):
    """All environments are stepped at once, so the number of environments shifts them."""
    for seed in (0, 1):
        write_run(tmp_path, "a2c", seed, [[1, 3]] * 20, every=100_000, eval_freq=100_000)
        write_run(tmp_path, "qppo", seed, [[5, 7]] * 20, every=100_000 // 128 * 128, eval_freq=100_000)
    groups = load_study(tmp_path)["Game-v0"]
    assert groups["qppo"][0].timesteps[-1] == 1_999_360
    compared = common_evaluations(groups)
    assert {tuple(record.timesteps) for records in compared.values() for record in records} == {
        tuple(range(100_000, 2_000_001, 100_000))
    }
    assert "At 2,000,000 steps" in " ".join(statistics(groups))


def test_evaluations_are_planned_in_their_order(tmp_path):
    """With 16 environments and an interval of 1,000, one takes place every 992 steps: the 63rd at 62,496."""
    write_run(tmp_path, "a2c", 0, [[1, 1]] * 70, eval_freq=1000)
    write_run(tmp_path, "qppo", 0, [[1, 1]] * 62 + [[500, 500]], every=992, eval_freq=1000, stop_return=400)
    groups = load_study(tmp_path)["Game-v0"]
    assert planned_steps(groups["qppo"][0]).tolist() == list(range(1000, 63_001, 1000))
    (compared,) = common_evaluations(groups)["qppo"]
    # Not the one that stopped the run
    assert compared.timesteps[-1] == 62_000 and compared.means.max() == 1
    # Evaluations may begin late, even with a single one
    for k in (60, 63, 120):
        late = dataclasses.replace(groups["qppo"][0], timesteps=np.array([k * 992]))
        assert planned_steps(late).tolist() == [k * 1000]


def test_evaluations_with_another_interval_stay_where_they_are(tmp_path):
    """With 128 environments and an interval of 500, an evaluation takes place every 384 steps."""
    write_run(tmp_path, "a2c", 0, [[1, 3]] * 3, every=384, eval_freq=500)
    (record,) = load_study(tmp_path)["Game-v0"]["a2c"]
    assert planned_steps(record).tolist() == [384, 768, 1152]
    # By more than 1 %
    late = dataclasses.replace(record, timesteps=np.array([490, 980]))
    assert planned_steps(late).tolist() == [490, 980]


def test_a_run_that_failed_counts_with_its_last_evaluation(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "a2c", seed, [[0, 2], [2, 4], [4, 6]])
    write_run(tmp_path, "qppo", 0, [[10, 10], [20, 20], [30, 30]])
    (write_run(tmp_path, "qppo", 1, [[1, 3]], finished=False) / "error.txt").write_text("broken")
    groups = load_study(tmp_path)["Game-v0"]
    compared = common_evaluations(groups)
    assert [record.means.tolist() for record in compared["qppo"]] == [[10, 20, 30], [2, 2, 2]]
    assert [record.timesteps.tolist() for record in compared["a2c"]] == 2 * [[1000, 2000, 3000]]
    assert "At 3,000 steps, the last evaluation that all runs have. " in " ".join(statistics(groups))
    assert "a failed run counts with its last evaluation" in text_of(tmp_path)


def test_the_average_is_over_the_evaluations_that_both_have(tmp_path):
    write_run(tmp_path, "a2c", 0, [[x, x] for x in (0, 10, 20)])
    run = write_run(tmp_path, "qppo", 0, [[x, x] for x in (0, 11, 23)])
    # (0 + 1 + 3) / 3, and (1 + 3) / 2
    assert list(differences(load_study(tmp_path)["Game-v0"], None))[-1] == "| qppo minus a2c | 3,000 | +3 | +1.33 |"
    np.savez(run / "evaluations.npz", timesteps=np.array([2000, 3000]), results=np.array([[11.0, 11.0], [23.0, 23.0]]))
    assert list(differences(load_study(tmp_path)["Game-v0"], None))[-1] == "| qppo minus a2c | 3,000 | +3 | +2 |"


def test_large_numbers_are_written_out(tmp_path):
    for seed in range(2):
        write_run(tmp_path, "a2c", seed, [[1234, 1234]])
        write_run(tmp_path, "qppo", seed, [[0, 0]])
    assert list(differences(load_study(tmp_path)["Game-v0"], None))[-1] == "| qppo minus a2c | 1,000 | -1,234 | -1,234 |"
    slow = write_run(tmp_path, "a2c", 2, [[1, 1], [18, 18]], steps_per_second=2000 / (140 * 3600))
    rows = list(runs_table(load_study(slow.parent)["Game-v0"], goal=18))
    assert any("| a2c_seed-2 |" in row and "| 2,000 | 140 |" in row for row in rows)


def test_what_is_not_known_of_a_run_is_not_called_none(tmp_path):
    run = write_run(tmp_path, "a2c", 0, [[0, 2]])
    settings = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**settings, "commit": None, "dtype": None}))
    text = text_of(tmp_path)
    assert "; commit not known; " in text and "precision of the network for images: float32." in text


def test_an_evaluation_file_that_is_half_written_counts_as_none(tmp_path):
    run = write_run(tmp_path, "a2c", 0, [[0, 2], [2, 4]])
    (run / "status.json").write_text(json.dumps({"steps": 2000, "finished": False}))
    whole = (run / "evaluations.npz").read_bytes()
    for content in (whole[: len(whole) // 2], b"", bytes(len(whole))):
        (run / "evaluations.npz").write_bytes(content)
        (record,) = load_study(tmp_path)["Game-v0"]["a2c"]
        assert len(record.timesteps) == len(record.returns) == 0


@pytest.mark.parametrize("name", ["evaluations.npz", "diagnosis.json", "curves.csv"])
def test_a_damaged_file_of_a_finished_run_is_refused_by_its_name(name, tmp_path):
    """Without its evaluations, the run would be missing from every comparison, and from a packed study for ever."""
    run = write_run(tmp_path, "a2c", 0, [[0, 2], [2, 4]])
    (run / "status.json").write_text(json.dumps({"steps": 2000, "finished": True}))
    content = (run / name).read_bytes() if name == "evaluations.npz" else b""
    (run / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(SystemExit, match=rf"^report: .*a2c_seed-0/{name} is damaged"):
        main(["report", str(tmp_path)])
    with pytest.raises(SystemExit, match=rf"^pack: .*a2c_seed-0/{name} is damaged"):
        pack.main([str(tmp_path), "--output", str(tmp_path / "packed")])


def test_a_folder_of_studies_is_refused_with_their_names(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / name, "a2c", 0, [[0, 2]])
    with pytest.raises(SystemExit, match=r"There are studies inside it: .*/one, .*/two\."):
        main(["report", str(tmp_path)])


def test_of_two_rows_of_one_step_the_later_one_is_drawn():
    curves = [pd.Series([1.0, 2.0, 3.0], index=[10, 20, 20]), pd.Series([5.0, 5.0], index=[10, 20])]
    assert median_curve(curves, [False, False]).to_dict() == {10: 3.0, 20: 4.0}


def test_evaluations_at_the_same_steps_are_compared(tmp_path):
    write_run(tmp_path, "a2c", 0, [[10, 10], [20, 20], [30, 30], [40, 40]], every=1000)
    write_run(tmp_path, "task1", 0, [[20, 20], [40, 40]], every=2000)
    # The mean of 20 and 40 for both
    assert list(differences(load_study(tmp_path)["Game-v0"], goal=None))[-1] == "| all-action minus a2c | 4,000 | +0 | +0 |"


def test_a_run_without_evaluation_does_not_stand_in_the_way_of_the_others(tmp_path):
    for seed in range(2):
        write_run(tmp_path, "a2c", seed, [[1, 3]])
        write_run(tmp_path, "task1", seed, [[3, 5]])
    (write_run(tmp_path, "ppo", 0, [], finished=False) / "error.txt").write_text("broken")
    write_run(tmp_path, "task1", 2, [], finished=False)
    text = text_of(tmp_path)
    assert "(none: all-action_seed-2 (unfinished), ppo_seed-0 (failed))" in text
    assert (
        "**Not finished:** all-action_seed-2 (unfinished), ppo_seed-0 (failed)." in text
        and "2 of a2c and 2 of all-action." in text
    )
    assert "| all-action minus a2c | 1,000 | +2 | +2 |" in text and "| ppo_seed-0 | failed |" in text
    assert "| ppo minus a2c | - | - | - |" in text


def test_the_table_has_last_best_and_the_way_to_the_goal(study):
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in runs_table(load_study(study)["Game-v0"], goal=18)
    ][2:]
    by_name = {row[0]: row[1:] for row in rows}
    # (10, 12): standard deviation sqrt 2 over sqrt 2 episodes is 1
    assert by_name["a2c_seed-0"] == [
        "finished",
        "2,000",
        "11.00 +/- 1.00",
        "11.00 +/- 1.00 at 2,000",
        "not reached",
        "-",
        "2.50",
        "100",
    ]
    # 18 at step 2,000, at 100 steps per second: 20 seconds are 0.0056 hours
    assert by_name["all-action_seed-0"] == [
        "finished",
        "3,000",
        "32.00 +/- 2.00",
        "32.00 +/- 2.00 at 3,000",
        "2,000",
        "0.0056",
        "2.50",
        "100",
    ]
    assert by_name["all-action_seed-1"][:4] == ["unfinished", "3,000", "21.00 +/- 1.00", "24.00 +/- 4.00 at 2,000"]


def test_an_evaluation_of_a_single_episode_has_no_standard_error(tmp_path):
    write_run(tmp_path, "a2c", 0, [[3], [5]])
    (row,) = list(runs_table(load_study(tmp_path)["Game-v0"], goal=None))[2:]
    assert "| 5.00 | 5.00 at 2,000 |" in row


def test_a_run_without_a_speed_has_no_hours_to_its_goal(tmp_path):
    run = write_run(tmp_path, "qppo", 0, [[18, 20]], finished=False)
    (run / "status.json").write_text(json.dumps(dict(steps=0, total=3000, seconds=1.5, finished=False)))
    write_run(tmp_path, "ppo", 0, [[18, 20]])
    text = text_of(tmp_path, goal=18)
    assert "| 1,000 | - |" in text and "nan" not in text
    assert "| qppo minus ppo | 1,000 | +0 | +0 | +0 | - |" in text


def test_the_machines_are_told_apart_by_their_processors(tmp_path):
    for seed, known in enumerate(({}, {"processor": "One"}, {"processor": "Other"})):
        run = write_run(tmp_path, "a2c", seed, [[1, 3]])
        settings = json.loads((run / "run.json").read_text())
        settings["machine"] |= known
        (run / "run.json").write_text(json.dumps(settings))
    assert "; 2 cores of One, no GPU; 2 cores of Other, no GPU; 2 cores, no GPU; " in text_of(tmp_path)


def test_a_return_that_is_not_a_number_is_not_the_best(tmp_path):
    write_run(tmp_path, "a2c", 0, [[1, 3], [np.nan, 3], [0, 2]])
    (record,) = load_study(tmp_path)["Game-v0"]["a2c"]
    assert record.best == 0
    assert "| 2.00 +/- 1.00 at 1,000 |" in text_of(tmp_path)


def test_a_report_names_the_actions_of_the_evaluations(tmp_path):
    write_run(tmp_path, "a2c", 0, [[4, 6]])
    assert "with sampled actions" in text_of(tmp_path)
    run = write_run(tmp_path, "pqn", 0, [[4, 6]])
    (run / "run.json").write_text((run / "run.json").read_text().replace('"deterministic": false', '"deterministic": true'))
    assert "with sampled (but pqn: the most probable) actions" in text_of(tmp_path)
    shutil.rmtree(tmp_path / "a2c_seed-0")
    assert "with the most probable actions" in text_of(tmp_path)


def test_the_report_is_there_in_every_form(study):
    text = write_report(study, goal=18).read_text()
    assert "**Not finished:** all-action_seed-1 (unfinished)." in text
    # At the last common evaluation a2c has 11 and 20, all-action 18 and 24; of the four pairs it wins three
    assert (
        "At 2,000 steps" in text
        and f"| a2c | 15.50 | 15.50 | 11.00 to 20.00 | {9 / np.sqrt(2):.2f} |" in text
        and f"| all-action | 21.00 | 21.00 | 18.00 to 24.00 | {6 / np.sqrt(2):.2f} |" in text
    )
    assert "| all-action over a2c | 0.75 |" in text
    assert "An interval over 2 seeds says little" in text
    for name in ("evaluations", "curves"):
        assert (study / f"{name}.svg").stat().st_size > 10_000
        with Image.open(study / f"{name}.png") as image:
            # Not blank: text and lines have many shades
            assert len(set(image.convert("RGB").getdata())) > 20 and image.width > 600
    html = (study / "report.html").read_text()
    assert html.count("<table>") == 4 and "evaluations.png" in html


def test_a_study_that_has_just_begun_has_a_report(tmp_path):
    write_run(tmp_path, "task1", 0, [], finished=False, curves=False)
    text = write_report(tmp_path, goal=18, output=tmp_path / "report").read_text()
    assert "| all-action_seed-0 | unfinished | 0 | - | - | not reached | - | - | - |" in text
    assert "The runs have no evaluation in common yet" in text
    # Nothing was logged
    assert "curves.png" not in text and not (tmp_path / "report" / "curves.png").exists()


@pytest.mark.slow
def test_the_same_study_gives_the_same_bytes(study):
    contents = [(write_report(study), *(path.read_bytes() for path in sorted(study.glob("*.*")))) for _ in range(2)]
    assert contents[0] == contents[1] and len(contents[0]) > 5


def test_one_seed_gives_no_interval(tmp_path):
    write_run(tmp_path, "task1", 0, [[1, 2]])
    assert "One seed gives no interval." in text_of(tmp_path)


def test_a_group_with_one_seed_does_not_hide_the_others(tmp_path):
    for group, n_seeds in ("a2c", 2), ("ppo", 3), ("qppo", 1):
        for seed in range(n_seeds):
            write_run(tmp_path, group, seed, [[1, 2 + seed]])
    text = text_of(tmp_path)
    assert "| qppo | 1.50 | - | - | - |" in text
    # The standard deviation of 1.5 and 2, and of 1.5, 2 and 2.5
    for start, end in ("| a2c | 1.75 | 1.75 | ", " | 0.35 |"), ("| ppo | 2.00 | 2.00 | ", " | 0.50 |"):
        assert any(line.startswith(start) and line.endswith(end) for line in text.splitlines())
    assert "| ppo over a2c |" in text and "over qppo" not in text and "qppo over" not in text
    assert "An interval over 2 seeds says little" in text


def test_a_single_group_is_not_compared(tmp_path):
    for seed in range(2):
        write_run(tmp_path, "task1", seed, [[1, 2]])
    text = text_of(tmp_path)
    assert "interquartile mean" in text and "not corrected" not in text and "minus" not in text and "\n\n\n" not in text


def test_a_single_group_is_not_compared_over_environments(tmp_path):
    for env_id in ("CartPole-v1", "Acrobot-v1"):
        for seed in range(2):
            write_run(tmp_path / env_id, "task1", seed, [[1, 2]], env_id=env_id)
    text = text_of(tmp_path)
    assert "## CartPole-v1" in text and "## Over environments" not in text and "\n\n\n" not in text
    # A second group that has not been evaluated yet
    for env_id in ("CartPole-v1", "Acrobot-v1"):
        write_run(tmp_path / env_id, "a2c", 0, [], env_id=env_id)
    text = text_of(tmp_path)
    assert "## Over environments\n\nFewer than two groups have two seeds in every environment, so none are" in text


def test_a_folder_without_a_study_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="There is no run of a study in"):
        main(["report", str(tmp_path)])


def test_welchs_interval_is_that_of_the_textbook():
    # Means 2 and 5, variances 1 and 4 over 3 seeds each: the standard error is sqrt(5 / 3), with
    # (1/3 + 4/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 50 / 17 degrees of freedom, whose t is 3.2190 (2.5 % in each tail)
    found = difference([4, 5, 6], [0, 2, 4])
    assert found.mean == 3 and found.low < 0
    np.testing.assert_allclose([found.low, found.high], 3 + np.array([-1, 1]) * 3.2190 * np.sqrt(5 / 3), rtol=1e-3)
    assert difference([10, 11, 12], [0, 2, 4]).low > 0 and difference([0, 2, 4], [10, 11, 12]).high < 0
    # Two seeds leave about one degree of freedom: 12.7 standard errors
    assert difference([10, 12], [0, 8]).low < 0
    assert np.isnan(difference([1], [0]).low)


@pytest.mark.parametrize(("ours", "theirs"), [(500.0, 400.0), (0.7, 0.6)])
def test_seeds_with_equal_figures_give_no_interval(ours, theirs):
    """Even where their mean is rounded, so that a variance computed from it is not 0."""
    found = difference([ours] * 10, [theirs] * 10)
    assert found.mean == pytest.approx(ours - theirs)
    assert np.isnan(found.low) and np.isnan(found.high)


@pytest.mark.parametrize(("n_seeds", "says"), [(4, True), (5, False)])
def test_an_interval_over_fewer_than_five_seeds_says_little(n_seeds, says, tmp_path):
    for seed in range(n_seeds):
        write_run(tmp_path, "a2c", seed, [[seed, seed]])
    text = " ".join(statistics(load_study(tmp_path)["Game-v0"]))
    assert (f"An interval over {n_seeds} seeds says little" in text) == says


def test_each_environment_has_the_stopping_return_of_its_runs(tmp_path):
    write_run(tmp_path, "a2c", 0, [[0, 2], [10, 12]], env_id="One-v0")
    write_run(tmp_path, "task1", 0, [[0, 2], [10, 12]], env_id="One-v0", stop_return=10)
    write_run(tmp_path, "a2c", 1, [[-9, -7, -5]], env_id="Two-v0", stop_return=-20)
    settings = tmp_path / "a2c_seed-1" / "run.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "n_eval_episodes": 3}))
    text = text_of(tmp_path)
    one, two = text.split("## Two-v0\n")
    assert "steps to 10 |" in one and "| 2,000 |" in one and "steps to -20" not in one
    assert "steps to -20 |" in two and "| 1,000 |" in two
    assert "Each evaluation is 2 or 3 whole episodes" in one
    assert "steps to 7 |" in text_of(tmp_path, goal=7)


def test_runs_with_different_hyperparameters_are_told(tmp_path):
    """As after a change of a preset, or with another file of the same name."""
    config = "!!python/object/apply:collections.OrderedDict\n- - - n_epochs\n    - {}\n  - - n_timesteps\n    - {}\n"
    for seed, n_epochs in enumerate((10, 10, 2)):
        run = write_run(tmp_path, "qppo", seed, [[0, 2]])
        (run / "Game-v0").mkdir()
        (run / "Game-v0" / "config.yml").write_text(config.format(n_epochs, 1000 * seed))
    different = "**The runs of qppo on Game-v0 have different hyperparameters:** "
    epochs = "n_epochs is 10 (qppo_seed-0), 10 (qppo_seed-1), 2 (qppo_seed-2)"
    steps = "n_timesteps is 0 (qppo_seed-0), 1000 (qppo_seed-1), 2000 (qppo_seed-2)"
    assert f"{different}{epochs}; {steps}.\n" in text_of(tmp_path)
    # Not the steps of a preset that `--steps` has replaced
    for path in tmp_path.glob("*/run.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "n_timesteps": 5000}))
    assert f"{different}{epochs}.\n" in text_of(tmp_path)
    shutil.rmtree(tmp_path / "qppo_seed-2")
    # A run that has just begun
    shutil.rmtree(tmp_path / "qppo_seed-0" / "Game-v0")
    assert "different hyperparameters" not in text_of(tmp_path)


def test_runs_with_different_evaluations_or_precisions_are_told(tmp_path):
    for seed, (native, dtype) in enumerate([(True, "float32"), (True, "bfloat16"), (False, None)]):
        write_run(tmp_path, "a2c", seed, [[0, 2]], native=native, dtype=dtype)
    write_run(tmp_path, "ppo", 0, [[0, 2]], native=True, dtype="float32")
    run = write_run(tmp_path, "ppo", 1, [[0, 2, 4]], native=True, dtype="float32")
    settings = {**json.loads((run / "run.json").read_text()), "n_eval_episodes": 3, "deterministic": True}
    (run / "run.json").write_text(json.dumps(settings))
    text = text_of(tmp_path)
    dtype = "dtype is float32 (a2c_seed-0), bfloat16 (a2c_seed-1), None (a2c_seed-2)"
    native = "native is True (a2c_seed-0), True (a2c_seed-1), False (a2c_seed-2)"
    assert f"**The runs of a2c on Game-v0 have different settings:** {dtype}; {native}.\n" in text
    deterministic = "deterministic is False (ppo_seed-0), True (ppo_seed-1)"
    episodes = "n_eval_episodes is 2 (ppo_seed-0), 3 (ppo_seed-1)"
    assert f"**The runs of ppo on Game-v0 have different settings:** {deterministic}; {episodes}.\n" in text


def test_algorithms_that_are_evaluated_in_different_ways_are_told(tmp_path, capsys):
    """As PQN with greedy actions, and the others with sampled ones."""
    write_run(tmp_path, "a2c", 0, [[0, 2]])
    write_run(tmp_path, "pqn", 0, [[0, 2]], deterministic=True)
    write_report(tmp_path)
    line = (
        "On Game-v0 algorithms are compared that were evaluated in different ways: deterministic is False (a2c), True (pqn)."
    )
    assert capsys.readouterr().err == f"report: {line}\n"


def test_runs_that_are_planned_for_different_numbers_of_steps_are_told(tmp_path):
    """Schedules fall over the whole training."""
    for group, n_timesteps in ("a2c", 2000), ("ppo", 9000), ("dqn", 0):
        write_run(tmp_path, group, 0, [[0, 2], [2, 4]], n_timesteps=n_timesteps)
    line = (
        "The runs on Game-v0 are planned for different numbers of steps:** 2,000 (a2c); 9,000 (ppo). Where they are compared"
    )
    assert line in text_of(tmp_path)
    # Those of a preset
    (tmp_path / "dqn_seed-0" / "Game-v0").mkdir()
    (tmp_path / "dqn_seed-0" / "Game-v0" / "config.yml").write_text("n_timesteps: 1e4")
    assert "2,000 (a2c); 10,000 (dqn); 9,000 (ppo)" in text_of(tmp_path)
    for group in ("dqn", "ppo"):
        shutil.rmtree(tmp_path / f"{group}_seed-0")
    assert "planned" not in text_of(tmp_path)


def test_a_run_whose_returns_are_not_numbers_is_named(tmp_path):
    for group in ("a2c", "task1"):
        write_run(tmp_path, group, 0, [[1, 2], [3, 4]])
    write_run(tmp_path, "a2c", 1, [[1, 2], [3, np.nan]])
    (warning,) = warnings_of(load_study(tmp_path))
    assert warning.startswith("**a2c_seed-1 has returns on Game-v0 that are not finite numbers**, first at 2,000 steps. Means")


def test_a_study_in_which_all_runs_failed_at_once_has_a_report(tmp_path):
    for seed in range(2):
        (write_run(tmp_path, "a2c", seed, [], finished=False) / "error.txt").write_text("broken")
    text = text_of(tmp_path)
    assert "**Not finished:** a2c_seed-0 (failed), a2c_seed-1 (failed)." in text
    assert "No run has an evaluation." in text and "yet" not in text
    write_run(tmp_path, "ppo", 0, [], finished=False)
    assert "no evaluation in common yet" in text_of(tmp_path)


def test_a_study_without_an_evaluation_has_no_plot_of_them(tmp_path):
    write_run(tmp_path, "a2c", 0, [])
    text = text_of(tmp_path)
    assert "evaluations.png" not in text and "curves.png" in text


def test_a_difference_in_steps_is_written_out(tmp_path):
    late = [[0, 0]] * 19 + [[18, 18]]
    for group, seed, returns in [("a2c", 0, late), ("a2c", 1, late), ("task1", 0, [[18, 18]] * 20), ("task1", 1, late)]:
        write_run(tmp_path, group, seed, returns)
    row = list(differences(load_study(tmp_path)["Game-v0"], goal=18))[-1]
    # 20,000 and 20,000 steps against 1,000 and 20,000: standard error 9,500, one degree of freedom, whose t is 12.7062
    assert "| -9,500 (-130,209 to +111,209) |" in row


def test_differences_of_every_pair_are_in_the_table(study):
    for seed, first in enumerate((20, 26)):
        write_run(study, "beta1", seed, [[2, 4], [first, first + 2]])
    _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in differences(load_study(study)["Game-v0"], goal=18)
        if line.startswith("| ")
    ]
    found = {pair: [cell.partition(" (")[0] for cell in cells] for pair, *cells in rows}
    # At 2,000 steps a2c has 11 and 20, all-action 18 and 24, beta-loo 21 and 27; over both evaluations 6 and 12.5, 9.5 and
    # 13.5, 12 and 15. The first seed of a2c does not reach 18. At 100 steps per second 2,000 steps are 0.0056 hours
    assert found == {
        "all-action minus a2c": ["2,000", "+5.5", "+2.25", "-", "-"],
        "beta-loo minus a2c": ["2,000", "+8.5", "+4.25", "-", "-"],
        "beta-loo minus all-action": ["2,000", "+3", "+2", "+0", "+0"],
    }


@pytest.mark.parametrize("seeds", [(4, 4), (3, 5)])
def test_intervals_are_those_of_rliable(seeds):
    """It calls functions of one resample, which takes minutes for a large study."""
    generator = np.random.default_rng(0)
    x, y = (generator.integers(0, 5, (n, 3)).astype(float) for n in seeds)
    for scores, ours, theirs in (
        ((x,), interquartile_mean, metrics.aggregate_iqm),
        ((x, y), probability_of_improvement, metrics.probability_of_improvement),
    ):
        pairs = {"first": scores, "second": scores[::-1]}
        estimates, intervals = bootstrap(pairs, ours, 50)
        np.random.seed(0)
        expected = library.get_interval_estimates(pairs, lambda *x, f=theirs: np.array([f(*x)]), reps=50)
        for name in pairs:
            np.testing.assert_allclose(estimates[name], expected[0][name][0])
            np.testing.assert_allclose(intervals[name], expected[1][name].ravel())


def test_the_median_of_curves_with_other_steps_is_in_the_order_of_steps():
    curves = [pd.Series([0.0, 4.0], index=[100, 300]), pd.Series([2.0, 4.0, 6.0], index=[150, 250, 350])]
    # At 150 and 250 the first is at 1 and 3, at 300 the second at 5; outside its steps a curve does not count
    middle = median_curve(curves, [False, False])
    assert middle.to_dict() == {100: 0.0, 150: 1.5, 250: 3.5, 300: 4.5, 350: 6.0}
    assert list(middle.index) == [100, 150, 250, 300, 350]


def test_the_median_of_curves_does_not_fall_where_a_good_run_stops_at_its_return():
    good, bad = pd.Series([0.0, 20.0], index=[100, 200]), pd.Series([0.0, 1.0, 2.0], index=[100, 200, 300])
    assert median_curve([good, bad], [True, False]).to_dict() == {100: 0.0, 200: 10.5, 300: 11.0}
    # A run that has not come further says nothing about its later steps
    assert median_curve([good, bad], [False, False]).to_dict() == {100: 0.0, 200: 10.5, 300: 2.0}
    # It has no value before its first one
    assert median_curve([good[1:], bad], [True, False]).to_dict() == {100: 0.0, 200: 10.5, 300: 11.0}


def test_the_median_of_curves_does_not_jump_where_bad_runs_fail(tmp_path, monkeypatch):
    for seed, returns in enumerate(([0, 0], [0, 0], [500, 500, 500])):
        run = write_run(tmp_path, "a2c", seed, [[x] for x in returns], finished=seed == 2)
        rows = "".join(f"{1000 * (i + 1)},{x}\n" for i, x in enumerate(returns))
        (run / "curves.csv").write_text(f"step,rollout/ep_rew_mean\n{rows}")
        if seed < 2:
            (run / "error.txt").write_text("ValueError: diverged")
    ways = []
    monkeypatch.setattr("sb3_qac.study.report.median_curve", lambda *args: ways.append(median_curve(*args)) or ways[-1])
    write_report(tmp_path)
    assert [way.to_dict() for way in ways] == [{1000: 0.0, 2000: 0.0, 3000: 0.0}]
    assert "or failed, its last value enters the median" in text_of(tmp_path)


def test_unfinished_runs_of_several_environments_are_told_apart(tmp_path):
    for env_id in ("One-v0", "Two-v0"):
        write_run(tmp_path / env_id, "a2c", 0, [[1, 2]], env_id=env_id, finished=False)
    assert "**Not finished:** One-v0 a2c_seed-0 (unfinished), Two-v0 a2c_seed-0 (unfinished)." in text_of(tmp_path)


@pytest.mark.parametrize("content", ["3", '{"env_id": 3}', '{"env_id": "CartPole-v1"}', "{}"])
def test_the_run_file_of_another_program_is_passed_over(content, study):
    for folder in (study / "other", study / "other" / "below", study / "other" / "below" / "it"):
        folder.mkdir()
        (folder / "run.json").write_text(content)
    assert {len(records) for records in load_study(study)["Game-v0"].values()} == {2}
    assert list(load_everything(study)) == [""]


def test_packed_data_and_folders_of_runs_are_not_mixed(study):
    for name in ("runs.csv", "settings.json"):
        (study / name).write_text("{}")
    message = r"has a packed study \(runs.csv\) and also folders of runs \(a2c_seed-0, a2c_seed-1, task1_seed-0, \.\.\.\)"
    with pytest.raises(SystemExit, match=f"^report: .*{message}.* folder of their own"):
        main(["report", str(study)])
    with pytest.raises(ValueError, match=message):
        load_everything(study)
    # A table of the user's
    (study / "settings.json").unlink()
    assert len(load_study(study)["Game-v0"]) == 2


def test_the_training_return_is_that_of_the_end_and_not_of_the_last_row_of_the_log(tmp_path):
    run = write_run(tmp_path, "a2c", 0, [[0, 2]])
    status = json.loads((run / "status.json").read_text())
    # The last row of the log has 2.5
    for at_the_end, shown in ((4.25, 4.25), (0.0, 0.0), (math.nan, 2.5), (None, 2.5)):
        (run / "status.json").write_text(json.dumps({**status, "training_return": at_the_end}))
        (record,) = load_study(tmp_path)["Game-v0"]["a2c"]
        assert record.metrics["training_return"] == shown


def test_a_group_always_looks_the_same():
    assert [x["color"] for x in _styles({"a2c": [], "beta-loo": [], "ppo": [], "all-action": []})] == ["C0", "C3", "C6", "C1"]
    assert [x["color"] for x in _styles({"beta-loo": [], "all-action": []})] == ["C3", "C1"]
    assert [x["color"] for x in _styles({"qppo-sampled": [], "a2c": [], "qppo": []})] == ["C5", "C0", "C4"]


def test_several_environments_make_one_report(tmp_path):
    for env_id, shift in (("MinAtar/Breakout-v1", 0), ("MinAtar/Asterix-v1", 100)):
        folder = tmp_path / env_id.replace("/", "-")
        for seed in range(3):
            write_run(folder, "a2c", seed, [[seed, seed]], env_id=env_id)
            write_run(folder, "task1", seed, [[shift, shift]], env_id=env_id)
    text = text_of(tmp_path)
    assert text.startswith("# MinAtar/Asterix-v1, MinAtar/Breakout-v1: a2c, all-action")
    # 100 against 0, 1, 2 wins always; 0 against 0, 1, 2 is half a win in three
    assert f"| all-action over a2c | {(1 + 1 / 6) / 2:.2f} |" in text
    assert "## MinAtar/Breakout-v1" in text and "### Over seeds" in text
    assert "![curves](curves.png)" in text


def test_the_goal_is_that_of_the_study(tmp_path):
    run = write_run(tmp_path, "task1", 0, [[1, 2]])
    settings = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**settings, "stop_return": 1.5}))
    assert "steps to 1.5" in text_of(tmp_path)
    (run / "run.json").write_text(json.dumps({**settings, "stop_return": None}))
    assert "steps to" not in text_of(tmp_path)


@pytest.fixture
def two_games(tmp_path):
    """Last mean returns of A2C are 2 and 20. PPO has not been run on the second game, nor has a third seed of QPPO."""
    returns = {"a2c": [(1, 10), (3, 30)], "qppo": [(4, 20), (8, 100)]}
    for game, env_id in enumerate(("First-v0", "Second-v0")):
        for group, of_seeds in returns.items():
            for seed, lasts in enumerate(of_seeds):
                evaluations = [[0, 0], [lasts[game] - 1, lasts[game] + 1]]
                write_run(tmp_path / env_id, group, seed, evaluations, env_id=env_id, steps_per_second=100 / (game + 1))
    for group, seed in ("ppo", 0), ("qppo", 2):
        write_run(tmp_path / "First-v0", group, seed, [[0, 0], [9, 9]], env_id="First-v0")
    return tmp_path


def test_relative_returns_are_interquartile_means_over_seeds_and_environments(two_games, monkeypatch):
    # Of all 256 resamples 8 % are below 1.5: too few to count on one among 50
    monkeypatch.setattr("sb3_qac.study.statistics.N_BOOTSTRAP_OF_RANKS", 500)
    relative = relative_returns(load_study(two_games), "a2c")
    assert relative.scales == {"First-v0": 2, "Second-v0": 20} and relative.timesteps.tolist() == [1000, 2000]
    # The middle two of 1/2, 3/2, 10/20 and 30/20, and of 4/2, 8/2, 20/20 and 100/20
    assert {name: means.tolist() for name, means in relative.means.items()} == {"a2c": [0, 1], "qppo": [0, 3]}
    low, high = relative.intervals["qppo"][:, -1]
    # All of QPPO's first seeds and all of its second ones give 1.5 and 4.5. The seeds of A2C are resampled too
    assert 1 <= low < 1.5 and 4.5 < high <= 9
    # Resamples of the reference are divided by their own mean: 1, 1 or 0.5, 1.5 in each game
    np.testing.assert_allclose(relative.intervals["a2c"][:, -1], 1)
    # 1,000 steps take 10 and 20 seconds
    np.testing.assert_allclose(relative.minutes["qppo"], [15 / 60, 30 / 60])


def test_a_resampled_seed_has_all_evaluations_of_its_run(tmp_path):
    """Both seeds of a run have half of their last return before, so the reference has exactly a half in every resample."""
    for env_id, scale in {"First-v0": 1, "Second-v0": 10}.items():
        for seed, value in enumerate((2, 6)):
            write_run(tmp_path / env_id, "ppo", seed, [[value * scale / 2] * 2, [value * scale] * 2], env_id=env_id)
    relative = relative_returns(load_study(tmp_path), "ppo")
    np.testing.assert_allclose(relative.intervals["ppo"], [[0.5, 1], [0.5, 1]])


def test_minutes_are_those_of_the_median_seed_and_the_mean_environment(tmp_path):
    for env_id, speeds in {"First-v0": (10, 20, 1000), "Second-v0": (50, 50, 50)}.items():
        for seed, speed in enumerate(speeds):
            write_run(tmp_path / env_id, "ppo", seed, [[1, 1], [2, 2]], env_id=env_id, steps_per_second=speed)
    # 2,000 steps take 100 and 40 seconds
    np.testing.assert_allclose(relative_returns(load_study(tmp_path), "ppo").minutes["ppo"], np.array([35, 70]) / 60)


def test_a_group_with_one_seed_has_no_interval_against_a_reference_with_more(two_games):
    for path in two_games.glob("*/qppo_seed-1"):
        shutil.rmtree(path)
    relative = relative_returns(load_study(two_games), "a2c")
    assert relative.n_seeds == {"a2c": 2, "qppo": 1}
    assert np.isnan(relative.intervals["qppo"]).all() and np.isfinite(relative.intervals["a2c"]).all()


def test_returns_are_divided_by_those_of_the_last_evaluation(tmp_path):
    """Not by the best one."""
    for seed in range(2):
        write_run(tmp_path, "a2c", seed, [[8, 8], [2, 2]])
    relative = relative_returns(load_study(tmp_path), "a2c")
    assert relative.scales == {"Game-v0": 2} and relative.means["a2c"].tolist() == [4, 1]


def test_a_seed_without_an_evaluation_is_not_compared_over_environments(two_games):
    write_run(two_games / "First-v0", "a2c", 2, [[0, 0], [9, 9]], env_id="First-v0")
    write_run(two_games / "Second-v0", "a2c", 2, [], env_id="Second-v0", finished=False)
    assert relative_returns(load_study(two_games), "a2c").n_seeds == {"a2c": 2, "qppo": 2}


def test_the_random_numbers_of_the_caller_are_left_alone(two_games):
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    relative_returns(load_study(two_games), "a2c")
    assert np.random.random() == expected


def test_relative_returns_have_no_interval_if_the_reference_has_one_seed(two_games):
    for path in two_games.glob("*/a2c_seed-1"):
        shutil.rmtree(path)
    relative = relative_returns(load_study(two_games), "a2c")
    assert relative.means["qppo"][-1] > 0 and all(np.isnan(interval).all() for interval in relative.intervals.values())


def test_relative_returns_have_no_interval_if_most_seeds_of_the_reference_return_nothing(tmp_path):
    """A resample of 0, 0 and 30 has only zeros with a probability of 8 in 27."""
    for group, returns in {"a2c": (0, 0, 30), "qppo": (40, 41, 42)}.items():
        for seed, value in enumerate(returns):
            write_run(tmp_path, group, seed, [[value, value]])
    relative = relative_returns(load_study(tmp_path), "a2c")
    assert relative.means["qppo"] == pytest.approx(4.1) and np.isnan(relative.intervals["qppo"]).all()
    assert "| qppo | 3 | 4.10 | - |" in "\n".join(relative_table(relative))


def test_relative_returns_have_no_interval_if_the_reference_may_be_negative(tmp_path):
    """A resample of -20, 21 and 21 has a negative mean, if it has -20 twice or more, with a probability of 7 in 27."""
    for group, returns in {"a2c": (-20, 21, 21), "qppo": (20.0, 20.05, 20.1)}.items():
        for seed, value in enumerate(returns):
            write_run(tmp_path, group, seed, [[value, value]])
    relative = relative_returns(load_study(tmp_path), "a2c")
    assert relative.means["qppo"] == pytest.approx(20.05 / (22 / 3)) and np.isnan(relative.intervals["qppo"]).all()


def test_relative_returns_are_those_of_the_same_evaluations_in_all_groups(tmp_path):
    """Of evaluations that were planned every 1,000 steps, 117 groups of 896 steps are 112 of 936."""
    for group, every in ("x", 896), ("a2c", 936):
        n_evaluations = 234 * 896 // every
        run = write_run(tmp_path, group, 0, [[i, i] for i in range(1, n_evaluations + 1)], every=every)
        settings = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**settings, "eval_freq": 1000}))
    relative = relative_returns(load_study(tmp_path), "a2c")
    assert relative.timesteps.tolist() == [117 * 896, 234 * 896]
    assert relative.scales == {"Game-v0": 224}
    np.testing.assert_allclose(relative.means["x"], [117 / 224, 234 / 224])


def test_relative_returns_have_a_plot_and_a_table(two_games):
    assert main(["report", str(two_games), "--reference", "a2c"]) == 0
    text = (two_games / "report.md").read_text()
    assert "## Relative to a2c" in text and "(2.00 in First-v0 and 20.00 in Second-v0)" in text
    row = next(line for line in text.splitlines() if line.startswith("| qppo | 2 | 3.00 | "))
    assert row.endswith(" | 0.5 |")
    assert "Left out, because they have no seed in every environment: ppo." in text
    assert "An interval over 2 seeds says little" in text[text.index("## Relative to") : text.index("## First-v0")]
    with Image.open(two_games / "relative.png") as image:
        assert image.width == 10 * 85 and len(set(image.convert("RGB").getdata())) > 20


@pytest.mark.parametrize("returns", [0, -3])
def test_relative_returns_leave_out_a_game_in_which_the_reference_returns_nothing(returns, two_games):
    for group, last in ("a2c", returns), ("qppo", 5):
        for seed in range(2):
            write_run(two_games / "Third-v0", group, seed, [[1, 1], [last, last]], env_id="Third-v0")
    relative = relative_returns(load_study(two_games), "a2c")
    assert relative.scales == {"First-v0": 2, "Second-v0": 20} and relative.not_positive == {"Third-v0": returns}
    assert {name: means.tolist() for name, means in relative.means.items()} == {"a2c": [0, 1], "qppo": [0, 3]}
    text = text_of(two_games, reference="a2c")
    left_out = f"Left out, because returns cannot be divided by one of a2c that is not positive: Third-v0 ({returns:.2f})."
    assert left_out in text


def test_relative_returns_of_a_single_seed_have_no_interval(tmp_path):
    write_run(tmp_path, "task1", 0, [[1, 3]])
    # 10 seconds
    assert "| all-action | 1 | 1.00 | - | 0.2 |" in text_of(tmp_path, reference="task1")
    status = tmp_path / "task1_seed-0" / "status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "seconds": 0}))
    assert "| all-action | 1 | 1.00 | - | - |" in text_of(tmp_path, reference="task1")


def test_relative_returns_of_a_single_evaluation_can_be_seen(tmp_path):
    for seed in range(2):
        write_run(tmp_path, "a2c", seed, [[1, 1 + seed]])
    write_report(tmp_path, reference="a2c")
    with Image.open(tmp_path / "relative.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    # The first color of matplotlib, without that of the legend's line: the left two thirds of the panels are below it
    blue = np.abs(pixels - [31, 119, 180]).sum(axis=2) < 60
    assert blue[100:, :].sum() > 50


@pytest.mark.parametrize(
    ("reference", "returns", "message"),
    [
        ("ppo", [[1, 1]], "'ppo' was given. There is a2c, qppo"),
        ("dqn", [[1, 1]], "'dqn' was given"),
        ("other", [[-1, 1]], "must be positive, but other returns 0.00 in Third-v0"),
        ("other", [], "'other' was given. There is none"),
    ],
)
def test_what_cannot_be_a_reference_is_refused(reference, returns, message, two_games):
    folder = two_games
    if reference == "other":
        folder = two_games / "alone"
        write_run(folder, "other", 0, returns, env_id="Third-v0")
    with pytest.raises(SystemExit, match=f"report: .*{message}"):
        main(["report", str(folder), "--reference", reference])
    assert not (folder / "report.md").exists()


def test_groups_are_compared_over_environments_by_the_seeds_that_they_have_in_each(two_games):
    text = text_of(two_games)
    assert "of the seeds that a group has in every environment: 2 of a2c and 2 of qppo." in text
    # On the first game, 4 and 8 against 1 and 3; on the second, 100 is above 10 and 30, and 20 above 10 only
    assert f"| qppo over a2c | {(1 + 3 / 4) / 2:.2f} |" in text


def test_groups_that_are_not_compared_over_environments_are_named(two_games):
    for group in ("dqn", "reinforce"):
        write_run(two_games / "Second-v0", group, 0, [[0, 0], [9, 9]], env_id="Second-v0")
    overall = text_of(two_games).partition("## Over environments")[2].partition("## ")[0]
    assert overall.endswith("Left out, because they have no two seeds in every environment: dqn, ppo and reinforce.\n\n")


def test_environments_without_a_common_evaluation_have_no_relative_returns(tmp_path):
    for env_id, every in {"First-v0": 1000, "Second-v0": 700}.items():
        write_run(tmp_path / env_id, "a2c", 0, [[1, 1]], env_id=env_id, every=every)
    with pytest.raises(ValueError, match="no evaluation in common"):
        relative_returns(load_study(tmp_path), "a2c")


def test_a_seed_that_is_there_twice_is_refused_by_the_paths_of_its_runs(two_games):
    write_run(two_games, "qppo", 1, [[0, 0], [9, 9]], env_id="Second-v0")
    message = "Second-v0/qppo_seed-1 and qppo_seed-1 are both the run of qppo on Second-v0 with seed 1"
    for more in [], ["--reference", "a2c"]:
        with pytest.raises(SystemExit, match=f"^report: {message}"):
            main(["report", str(two_games), *more])


def test_a_copy_of_a_run_is_refused(tmp_path):
    run = write_run(tmp_path, "a2c", 0, [[0, 2]])
    shutil.copytree(run, tmp_path / "a2c_seed-0 (copy)")
    with pytest.raises(SystemExit, match="are both the run of a2c on Game-v0 with seed 0, and would count twice"):
        main(["report", str(tmp_path)])


def test_runs_with_other_evaluations_are_told(tmp_path):
    """Who evaluates more often has more chances to reach a return by luck."""
    write_run(tmp_path, "a2c", 0, [[0, 2]], eval_freq=1000)
    write_run(tmp_path, "a2c", 1, [[0, 2]], eval_freq=500)
    text = text_of(tmp_path)
    assert "different settings:** eval_freq is 1000 (a2c_seed-0), 500 (a2c_seed-1)." in text


def test_files_of_other_programs_are_passed_over(tmp_path):
    write_run(tmp_path / "study", "a2c", 0, [[0, 2]])
    (tmp_path / "study" / "other").mkdir()
    (tmp_path / "study" / "other" / "run.json").write_text('{"a": 1}')
    assert list(load_study(tmp_path / "study")["Game-v0"]) == ["a2c"]
    assert list(load_everything(tmp_path / "study")) == [""]
    (tmp_path / "runs.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="There is no run of a study in"):
        load_study(tmp_path / "empty")


def test_a_difference_that_is_not_a_number_is_called_so(tmp_path):
    for group, returns in ("a2c", [1, 2]), ("all-action", [np.nan, np.nan]):
        for seed in 0, 1:
            write_run(tmp_path, group, seed, [[0, 0], returns])
    text = text_of(tmp_path)
    assert "not a number" in text and "nan (no interval" not in text


def test_a_group_of_one_seed_does_not_hide_that_the_others_have_few(two_games):
    write_run(two_games / "Second-v0", "ppo", 0, [[0, 0], [9, 9]], env_id="Second-v0")
    text = text_of(two_games, reference="a2c")
    assert "An interval over 2 seeds says little" in text[text.index("## Relative to") : text.index("## First-v0")]


def test_a_report_says_why_groups_are_not_compared_over_environments(tmp_path):
    for env_id in ("First-v0", "Second-v0"):
        for group in ("a2c", "ppo"):
            write_run(tmp_path / env_id, group, 0, [[1, 1]], env_id=env_id)
    assert "Fewer than two groups have two seeds in every environment" in text_of(tmp_path)
    for every, env_id, group in [
        (1000, "First-v0", "a2c"),
        (1000, "First-v0", "ppo"),
        (1000, "Second-v0", "a2c"),
        (700, "Second-v0", "ppo"),
    ]:
        write_run(tmp_path / env_id, group, 1, [[1, 1]], env_id=env_id, every=every)
    text = text_of(tmp_path)
    assert "Second-v0: The runs have no evaluation after the same number of steps, so they are not compared." in text
