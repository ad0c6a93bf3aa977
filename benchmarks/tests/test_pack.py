"""A packed study says what its folders said."""

import contextlib
import dataclasses
import io
import json
import lzma
import shlex
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from torch.utils.tensorboard import SummaryWriter

from benchmarks import pack as module
from benchmarks.ladder import write_page
from benchmarks.pack import N_POINTS, add_packed, command_of, load_everything, rounded, thinned, write_pack
from sb3_qac.__main__ import main, make_parser
from sb3_qac.commands.study import grid_of
from sb3_qac.study.diagnosis import diagnose_run
from sb3_qac.study.grid import make_grid, run_study
from sb3_qac.study.loading import load_curves, load_run, load_study, summary_metrics
from sb3_qac.study.pack import load_pack
from sb3_qac.study.records import records_of
from sb3_qac.study.report import markdown, write_report
from tests.test_report import write_run

COMMANDS = {"pack": module.main, "report": lambda arguments: main(["report", *arguments])}
PARTS = {"": 5, "part": 2, "stopped": 1}
FILES = ["curves.csv.xz", "diagnosis.json", "evaluations.csv.xz", "runs.csv", "settings.json"]


pytestmark = pytest.mark.usefixtures("quick_bootstrap")
LESS = r"pack: 1 of the packed runs .* would be lost, .* or has less of them: a2c_seed-0\. Give"


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A study with a finished, a stopped, a failed and a diagnosed run, and a part in a folder of its own."""
    folder = tmp_path_factory.mktemp("studies") / "cartpole"
    settings = dict(n_timesteps=2000, eval_freq=400, n_eval_episodes=3, wandb="disabled", device="cpu")
    runs = make_grid("cartpole", ["a2c", "all-action"], [0, 1], folder, **settings)
    runs += make_grid("cartpole", ["all-action-baseline"], [0], folder / "stopped", stop_return=5.0, **settings)
    bad = make_grid("cartpole", ["all-action"], [2], folder, **settings)
    runs += [dataclasses.replace(run, hyperparams={"gamma": -1}) for run in bad]
    runs += make_grid("Acrobot-v1", ["all-action"], [0, 1], folder / "part" / "Acrobot-v1", **{**settings, "n_timesteps": 400})
    assert list(run_study(runs)) == [bad[0].folder]
    diagnose_run(Path(runs[2].folder), n_rollouts=3, n_points=2)
    # A measured time differs from run to run. With more than a pack's six digits, the speeds on the page would now and then
    # differ by one in the last place.
    for path in folder.rglob("status.json"):
        status = json.loads(path.read_text())
        path.write_text(json.dumps(rounded(status)))
    return folder


@pytest.fixture(scope="module")
def packed(live, tmp_path_factory):
    output = tmp_path_factory.mktemp("results") / "cartpole"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert module.main([str(live), "--output", str(output)]) == 0
    assert sorted(path.name for path in output.iterdir()) == FILES
    assert sorted(printed.getvalue().split()) == [str(output / name) for name in FILES]
    return output


def test_a_packed_run_is_not_replaced_by_one_that_has_been_begun_again(tmp_path):
    """As in a new clone, which has the packed study and not the folders of its runs."""
    packed = tmp_path / "packed"
    write_run(tmp_path / "first", "a2c", 0, [[0, 2], [10, 12]], algo="a2c")
    assert module.main([str(tmp_path / "first"), "--output", str(packed)]) == 0
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    write_run(tmp_path / "again", "a2c", 0, [], finished=False, algo="a2c")
    with pytest.raises(SystemExit, match=LESS):
        module.main([str(tmp_path / "again"), "--output", str(packed)])
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before


@pytest.mark.parametrize("gone", ["evaluations.npz", "curves.csv", "diagnosis.json"])
def test_what_the_pack_alone_has_of_a_run_is_kept(gone, tmp_path):
    packed, again = tmp_path / "packed", tmp_path / "again"
    run = write_run(again, "a2c", 0, [[0, 2], [10, 12]], algo="a2c")
    (run / "diagnosis.json").write_text('[{"steps": 1000}]')
    assert module.main([str(again), "--output", str(packed)]) == 0
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    assert len(before) == len(FILES)
    (run / gone).unlink()
    with pytest.raises(SystemExit, match=LESS):
        module.main([str(again), "--output", str(packed)])
    assert module.main([str(again), "--add", "--output", str(packed)]) == 0
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before


def test_a_run_that_is_a_link_is_packed_and_one_that_leads_back_is_not_followed(tmp_path):
    study = tmp_path / "study"
    write_run(study, "a2c", 0, [[0, 2]], algo="a2c")
    (study / "a2c_seed-1").symlink_to(write_run(tmp_path / "elsewhere", "a2c", 1, [[0, 2]], algo="a2c"))
    (study / "part").mkdir()
    (study / "part" / "back").symlink_to(study)
    assert list(load_everything(study)) == [""]
    assert [record.path for record in load_everything(study)[""]] == ["a2c_seed-0", "a2c_seed-1"]


@pytest.mark.slow
def test_the_report_of_a_packed_study_is_that_of_its_folders(live, packed, tmp_path):
    for part in PARTS:
        texts = [markdown(load_study(folder / part), goal=20.0) for folder in (live, packed)]
        assert texts[0] == texts[1] and len(texts[0].splitlines()) > 20
    text = write_report(packed, goal=20.0, output=tmp_path).read_text()
    assert text == markdown(load_study(live), goal=20.0)
    assert "| all-action_seed-2 | failed |" in text
    assert "## Differences" in text and "Number of seeds: 2 of a2c and 2 of all-action." in text
    # A part is found under the path that its folder had, and is not mixed into the study
    assert list(load_study(packed)) == ["CartPole-v1"] and list(load_study(packed / "part")) == ["Acrobot-v1"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_evaluations_are_exact_and_other_figures_have_six_digits(live, packed):
    for part, n_runs in PARTS.items():
        pairs = [
            (x, y)
            for env_id, groups in load_study(live / part).items()
            for group, records in groups.items()
            for x, y in zip(records, load_study(packed / part)[env_id][group], strict=True)
        ]
        assert len(pairs) == n_runs
        for x, y in pairs:
            np.testing.assert_array_equal(x.timesteps, y.timesteps)
            np.testing.assert_array_equal(x.returns, y.returns)
            if len(x.timesteps):
                np.testing.assert_array_equal(x.lengths, y.lengths)
            assert (x.state, rounded(x.metrics), rounded(x.diagnosis)) == (y.state, y.metrics, y.diagnosis)
            assert x.status.get("steps", 0) == y.status["steps"]
            assert rounded(x.status.get("seconds", 0.0)) == y.status["seconds"]
            assert x.settings == {name: value for name, value in y.settings.items() if name != "command"}
            assert x.failed or x.settings["resolved_hyperparams"]["policy"] == "MlpPolicy"


def test_figures_of_a_log_have_six_digits(tmp_path):
    with SummaryWriter(str(tmp_path / "tensorboard" / "QA2C_1")) as log:
        log.add_scalar("rollout/ep_rew_mean", 12345.6, 100)
    assert summary_metrics(load_curves(tmp_path))["training_return"] == 12345.6
    # Its own file, which is read where there are no logs
    shutil.rmtree(tmp_path / "tensorboard")
    assert summary_metrics(load_curves(tmp_path))["training_return"] == 12345.6


@pytest.mark.slow
def test_every_run_and_every_episode_has_a_row(packed):
    runs = pd.read_csv(packed / "runs.csv").set_index("run")
    assert runs["state"].to_dict() == {
        "a2c_seed-0": "finished",
        "a2c_seed-1": "finished",
        "all-action_seed-0": "finished",
        "all-action_seed-1": "finished",
        "all-action_seed-2": "failed",
        "stopped/all-action-baseline_seed-0": "stopped",
        "part/Acrobot-v1/all-action_seed-0": "finished",
        "part/Acrobot-v1/all-action_seed-1": "finished",
    }
    assert set(runs["study"]) == {"cartpole", "cartpole/part", "cartpole/stopped"}
    assert runs.loc["all-action_seed-0", "group"] == "all-action" and runs.loc["all-action_seed-0", "seconds"] > 0
    episodes = pd.read_csv(packed / "evaluations.csv.xz")
    # 5 evaluations of 3 episodes; one evaluation of the run that was stopped, and of each in the part
    assert episodes.groupby("run").size().to_dict() == {
        **dict.fromkeys(("a2c_seed-0", "a2c_seed-1", "all-action_seed-0", "all-action_seed-1"), 15),
        **dict.fromkeys(
            ("stopped/all-action-baseline_seed-0", "part/Acrobot-v1/all-action_seed-0", "part/Acrobot-v1/all-action_seed-1"), 3
        ),
    }
    last = episodes[(episodes["run"] == "a2c_seed-0") & (episodes["steps"] == 2000)]
    assert runs.loc["a2c_seed-0", "last_evaluation"] == pytest.approx(last["return"].mean())
    # A step of CartPole is worth 1
    assert (last["return"] == last["length"]).all()


@pytest.mark.slow
def test_settings_are_written_once_for_all_seeds(live, packed):
    runs = pd.read_csv(packed / "runs.csv").set_index("run")
    settings = json.loads((packed / "settings.json").read_text())
    # The failed run has another gamma. Those of the part have another environment, and that alone is in `runs.csv`
    assert runs["settings"].nunique() == len(settings) < len(runs)
    assert (
        runs.loc["all-action_seed-0", "settings"]
        == runs.loc["all-action_seed-1", "settings"]
        != runs.loc["all-action_seed-2", "settings"]
    )
    assert settings[runs.loc["all-action_seed-2", "settings"]]["hyperparams"] == {"gamma": -1}
    original = json.loads((live / "a2c_seed-1" / "run.json").read_text())
    kept = settings[runs.loc["a2c_seed-1", "settings"]]
    assert {name: kept[name] for name in ("versions", "machine", "n_timesteps")} == {
        name: original[name] for name in ("versions", "machine", "n_timesteps")
    }
    assert not {"name", "seed", "commit", "env_id"} & set(kept)


@pytest.mark.slow
def test_a_study_is_packed_to_the_same_bytes(live, packed, tmp_path):
    write_pack(load_everything(live), tmp_path / "cartpole")
    for name in FILES:
        assert (tmp_path / "cartpole" / name).read_bytes() == (packed / name).read_bytes()
    # What a study no longer has does not stay
    parts = {"": [dataclasses.replace(load_study(live)["CartPole-v1"]["a2c"][0], curves={}, diagnosis=[])]}
    write_pack(parts, tmp_path / "cartpole")
    names = sorted(path.name for path in (tmp_path / "cartpole").iterdir())
    assert names == ["evaluations.csv.xz", "runs.csv", "settings.json"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["7", "None", "cartpole"])
def test_a_study_can_be_packed_into_the_folder_where_the_command_runs(name, live, packed, tmp_path, monkeypatch):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    for options in ([], ["--add"]):
        assert module.main([str(live), "--output", ".", *options]) == 0
    assert len(load_everything(live)) == len(set(pd.read_csv("runs.csv", dtype=str, keep_default_na=False)["study"]))
    assert len(load_study(folder)) == 1
    # Without parts
    Path("runs.csv").unlink()
    assert module.main([str(live / "part" / "Acrobot-v1"), "--output", "."]) == 0
    assert module.main([str(live / "part" / "Acrobot-v1"), "--output", ".", "--add"]) == 0
    assert [record.name for record in load_pack(folder)] == [record.name for record in load_pack(packed, "part")]


@pytest.mark.slow
def test_runs_are_added_to_those_that_are_packed_already(live, packed, tmp_path):
    """As if all folders had been there at once."""
    here, there = tmp_path / "here", tmp_path / "there"
    for path in live.glob("**/run.json"):
        if path.parent.name != "checkpoints":
            run = path.parent.relative_to(live)
            # The part and one run of the study are on another machine
            target = there if run.parts[0] == "part" or run.name == "a2c_seed-1" else here
            shutil.copytree(path.parent, target / run)
    output = tmp_path / "cartpole"
    for folder in (there, here, there):
        assert module.main([str(folder), "--output", str(output), "--add"]) == 0
    for name in FILES:
        assert (output / name).read_bytes() == (packed / name).read_bytes()


def test_a_run_that_was_trained_again_has_no_part_of_the_earlier_one(tmp_path):
    output = tmp_path / "packed"
    run = write_run(tmp_path / "first", "qa2c", 0, [[0, 2], [10, 12]], algo="qa2c")
    (run / "diagnosis.json").write_text('[{"steps": 1000}]')
    write_run(tmp_path / "again", "qa2c", 0, [[0, 2], [10, 13]], algo="qa2c", curves=False)
    for folder in ("first", "again"):
        assert module.main([str(tmp_path / folder), "--output", str(output), "--add"]) == 0
    (record,) = load_pack(output)
    assert record.means.tolist() == [1, 11.5] and not record.diagnosis and not record.curves


def test_a_diagnosis_from_before_the_first_evaluation_is_kept(tmp_path):
    run = write_run(tmp_path / "first", "qa2c", 0, [], algo="qa2c", finished=False)
    (run / "diagnosis.json").write_text('[{"steps": 1000}]')
    write_run(tmp_path / "later", "qa2c", 0, [[0, 2], [10, 12]], algo="qa2c")
    for folder in ("first", "later"):
        assert module.main([str(tmp_path / folder), "--output", str(tmp_path / "packed"), "--add"]) == 0
    (record,) = load_pack(tmp_path / "packed")
    assert record.diagnosis == [{"steps": 1000}] and len(record.means) == 2


@pytest.mark.slow
def test_packed_runs_that_the_study_does_not_have_are_not_dropped(live, packed, tmp_path):
    output, study = shutil.copytree(packed, tmp_path / "cartpole"), tmp_path / "study"
    shutil.copytree(live / "a2c_seed-0", study / "a2c_seed-0")
    n_others = len(pd.read_csv(packed / "runs.csv")) - 1
    others = "a2c_seed-1, all-action_seed-0, all-action_seed-1, ..."
    message = f"{n_others} of the packed runs in .* would be lost, because .*: {others}. Give `--add` to keep them, or delete"
    with pytest.raises(SystemExit, match=f"^pack: {message}"):
        module.main([str(study), "--output", str(output)])
    assert {name: (output / name).read_bytes() for name in FILES} == {name: (packed / name).read_bytes() for name in FILES}
    (output / "runs.csv").write_text("a,b\n1,2\n")
    for options in ([], ["--add"]):
        with pytest.raises(SystemExit, match=r"^pack: .*runs.csv is damaged: .* or delete it to pack again\."):
            module.main([str(study), "--output", str(output), *options])
    (output / "runs.csv").unlink()
    assert module.main([str(study), "--output", str(output)]) == 0
    assert list(pd.read_csv(output / "runs.csv")["run"]) == ["a2c_seed-0"]


@pytest.mark.slow
def test_a_run_is_not_replaced_by_one_of_another_environment(live, packed, tmp_path):
    output = shutil.copytree(packed, tmp_path / "cartpole")
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    other = shutil.copytree(live / "part" / "Acrobot-v1" / "all-action_seed-0", tmp_path / "Acrobot-v1" / "all-action_seed-0")
    for add in ["--add"], []:
        with pytest.raises(SystemExit, match="all-action_seed-0 is a run on Acrobot-v1, but that of this name"):
            module.main([str(other.parent), "--output", str(output), *add])
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    # In the folder of its environment it is another run. The same run in two places is refused
    shutil.move(other, tmp_path / "study" / "Acrobot-v1" / other.name)
    assert module.main([str(tmp_path / "study"), "--output", str(output), "--add"]) == 0
    assert {"all-action_seed-0", "Acrobot-v1/all-action_seed-0"} <= set(pd.read_csv(output / "runs.csv")["run"])
    shutil.move(tmp_path / "study" / "Acrobot-v1" / other.name, tmp_path / "moved" / "again_seed-0")
    with pytest.raises(SystemExit, match="are both the run of all-action on Acrobot-v1 with seed 0, and would count twice"):
        module.main([str(tmp_path / "moved"), "--output", str(output), "--add"])


def with_unfinished(parts, path):
    """:return: the records, with this run as it is before its end"""
    next(record for record in records_of(parts) if record.path == path).status["finished"] = False
    return parts


@pytest.mark.slow
def test_a_run_that_was_lost_stays_lost_when_others_are_added(live, tmp_path):
    output = tmp_path / "cartpole"
    write_pack(with_unfinished(load_everything(live), "a2c_seed-1"), output, ["a2c_seed-1"])
    others = {"": [load_study(live)["CartPole-v1"]["a2c"][0]]}
    write_pack(add_packed(others, output), output)
    assert pd.read_csv(output / "runs.csv").set_index("run").loc["a2c_seed-1", "state"] == "lost"
    # The report says why it covers less
    assert "**Not finished:** a2c_seed-1 (lost)" in markdown(load_study(output), None)


@pytest.mark.slow
def test_a_finished_run_is_not_replaced_by_one_that_has_been_begun_again_elsewhere(live, packed, tmp_path, capsys):
    output, again = shutil.copytree(packed, tmp_path / "cartpole"), tmp_path / "again"
    shutil.copytree(live / "a2c_seed-1", again / "a2c_seed-1")
    (again / "a2c_seed-1" / "evaluations.npz").unlink()
    status = again / "a2c_seed-1" / "status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "steps": 0, "finished": False}))
    before = {name: (output / name).read_bytes() for name in FILES}
    assert module.main([str(again), "--output", str(output), "--add"]) == 0
    assert {name: (output / name).read_bytes() for name in FILES} == before
    kept = f"its finished run in {output}, at 2,000 steps, is kept."
    assert f"a2c_seed-1 is unfinished in {again}, at 0 steps: {kept}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("lost", [True, False])
def test_of_two_unfinished_runs_the_one_with_more_steps_stays(lost, live, tmp_path, capsys):
    def pack(n_steps, *options):
        status = study / "a2c_seed-1" / "status.json"
        status.write_text(json.dumps({**json.loads(status.read_text()), "steps": n_steps, "finished": False}))
        assert module.main([str(study), "--output", str(output), *options]) == 0
        return list(pd.read_csv(output / "runs.csv")[["state", "steps"]].itertuples(index=False, name=None))

    study, output = tmp_path / "study", tmp_path / "packed"
    shutil.copytree(live / "a2c_seed-1", study / "a2c_seed-1")
    state = "lost" if lost else "unfinished"
    assert pack(1500, *(["--lost", "a2c_seed-1"] if lost else [])) == [(state, 1500)]
    assert pack(400, "--add") == [(state, 1500)]
    assert f"at 400 steps: its {state} run in {output}, at 1,500 steps, is kept." in capsys.readouterr().err
    assert pack(1600, "--add") == [("unfinished", 1600)]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--add"]])
def test_a_finished_run_is_not_replaced_by_a_shorter_one_of_its_name(options, live, packed, tmp_path, capsys):
    """As one of a study with fewer `--steps`."""
    output, study = shutil.copytree(packed, tmp_path / "cartpole"), shutil.copytree(live, tmp_path / "study")
    status = study / "a2c_seed-1" / "status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "steps": 1000}))
    before = {name: (output / name).read_bytes() for name in FILES}
    command = [str(study), "--output", str(output), *options]
    if options:
        assert module.main(command) == 0
        assert f"a2c_seed-1 is finished in {study}, at 1,000 steps: its finished run" in capsys.readouterr().err
    else:
        with pytest.raises(SystemExit, match=r"1 of the packed runs .* would be lost"):
            module.main(command)
    assert {name: (output / name).read_bytes() for name in FILES} == before


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--add"]])
def test_a_lost_run_stays_lost_when_it_is_packed_again(options, live, tmp_path):
    study, output = shutil.copytree(live, tmp_path / "study"), tmp_path / "packed"
    status = study / "a2c_seed-1" / "status.json"
    for n_steps, option, state in (
        (1500, ["--lost", "a2c_seed-1"], "lost"),
        (1500, options, "lost"),
        (1600, options, "unfinished"),
    ):
        status.write_text(json.dumps({**json.loads(status.read_text()), "steps": n_steps, "finished": False}))
        assert module.main([str(study), "--output", str(output), *option]) == 0
        assert pd.read_csv(output / "runs.csv").set_index("run").loc["a2c_seed-1", "state"] == state


@pytest.mark.slow
def test_two_packs_are_merged(live, tmp_path):
    whole, one, other = (tmp_path / name / "cartpole" for name in ("whole", "one", "other"))
    parts = load_everything(live)
    write_pack(parts, whole)
    write_pack({"": parts[""][:1]}, one)
    write_pack({**parts, "": parts[""][1:]}, other)
    assert module.main([str(one), "--add", "--output", str(other)]) == 0
    for name in FILES:
        assert (other / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("n_written", range(3))
def test_a_pack_that_is_interrupted_leaves_what_was_packed(n_written, live, tmp_path, monkeypatch):
    output, to_csv, calls = tmp_path / "cartpole", pd.DataFrame.to_csv, []
    write_pack(load_everything(live), output)
    before = {path.name: path.read_bytes() for path in output.iterdir()}

    def interrupted(*args, **kwargs):
        if len(calls) == n_written:
            raise KeyboardInterrupt
        calls.append(args)
        return to_csv(*args, **kwargs)

    monkeypatch.setattr(pd.DataFrame, "to_csv", interrupted)
    others = {"": [load_study(output)["CartPole-v1"]["a2c"][0]]}
    with pytest.raises(KeyboardInterrupt):
        write_pack(others, output)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


@pytest.mark.slow
def test_a_kill_between_two_files_gives_no_run_the_settings_of_another(live, tmp_path, monkeypatch):
    output, replace, study = tmp_path / "cartpole", Path.replace, load_study(live)["CartPole-v1"]

    def killed(self, target):
        if self.name == "runs.csv":
            raise KeyboardInterrupt
        return replace(self, target)

    write_pack({"": study["all-action"][:1]}, output)
    (before,) = load_pack(output)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        write_pack({"": [*study["a2c"], study["all-action"][0]]}, output)
    (after,) = load_pack(output)
    assert after.settings == before.settings
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        write_pack({"": study["a2c"]}, output)
    with pytest.raises(ValueError, match="a file is missing or damaged"):
        load_pack(output)


@pytest.mark.slow
def test_keys_of_settings_may_be_numbers_and_strings(live, tmp_path):
    record = load_study(live)["CartPole-v1"]["a2c"][0]
    settings = {**record.settings, "hyperparams": {"env_kwargs": {0: 1.0, "goal": 2.0}}}
    write_pack({"": [dataclasses.replace(record, settings=settings)]}, tmp_path)
    assert load_pack(tmp_path)[0].settings["hyperparams"] == {"env_kwargs": {"0": 1.0, "goal": 2.0}}


@pytest.mark.slow
def test_numbered_settings_of_0_1_0_are_read(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "old")
    settings = json.loads((packed / "settings.json").read_text())
    (tmp_path / "old" / "settings.json").write_text(json.dumps(list(settings.values())))
    runs = pd.read_csv(packed / "runs.csv", keep_default_na=False)
    runs["settings"] = runs["settings"].map(list(settings).index)
    runs.to_csv(tmp_path / "old" / "runs.csv", index=False)
    for old, new in zip(load_pack(tmp_path / "old"), load_pack(packed), strict=True):
        assert old.settings == new.settings


@pytest.mark.slow
def test_returns_are_read_as_they_were_written(live, tmp_path):
    record = load_study(live)["CartPole-v1"]["a2c"][0]
    returns = np.random.default_rng(0).standard_normal(record.returns.shape) * 10.0 ** np.arange(-5, 10, 3)[:, None]
    write_pack({"": [dataclasses.replace(record, returns=returns, lengths=None)]}, tmp_path / "study")
    (read,) = load_study(tmp_path / "study")["CartPole-v1"]["a2c"]
    np.testing.assert_array_equal(read.returns, returns)
    assert read.lengths is None


@pytest.mark.slow
def test_whole_returns_are_written_as_integers(live, tmp_path):
    record = load_study(live)["CartPole-v1"]["a2c"][0]
    write_pack({"": [record]}, tmp_path)
    with lzma.open(tmp_path / "evaluations.csv.xz", "rt") as file:
        assert file.read().splitlines()[:2] == [
            "run,steps,return,length",
            f"a2c_seed-0,{record.timesteps[0]},{record.returns[0, 0]:.0f},{record.lengths[0, 0]}",
        ]


@pytest.mark.slow
def test_a_pack_of_0_1_0_is_read(packed, tmp_path):
    """Its evaluations have a column with the number of the episode."""
    shutil.copytree(packed, tmp_path / "old")
    path = tmp_path / "old" / "evaluations.csv.xz"
    episodes = pd.read_csv(path)
    episodes.insert(2, "episode", episodes.groupby(["run", "steps"]).cumcount())
    episodes.astype({"return": float}).to_csv(path, index=False)
    for old, new in zip(*(load_study(folder)["CartPole-v1"]["a2c"] for folder in (tmp_path / "old", packed)), strict=True):
        np.testing.assert_array_equal(old.returns, new.returns)
        np.testing.assert_array_equal(old.lengths, new.lengths)


@pytest.mark.slow
def test_curves_are_thinned_to_means_of_consecutive_rows(live):
    record = load_study(live)["CartPole-v1"]["a2c"][0]
    n = 4 * N_POINTS
    steps = 10 * np.arange(1, n + 1)
    curves = {"a": pd.Series(np.arange(n, dtype=float), index=steps), "b": pd.Series([7.0], index=[steps[1]])}
    table = thinned(dataclasses.replace(record, curves=curves))
    assert len(table) == N_POINTS
    # 0 to 3, at the steps of the last of them
    assert table.iloc[0].to_dict() == {"run": record.path, "step": 40, "a": 1.5, "b": 7.0}
    assert table.iloc[-1]["step"] == 10 * n and table["b"].notna().sum() == 1
    few = {"a": curves["a"].iloc[:N_POINTS]}
    assert thinned(dataclasses.replace(record, curves=few))["a"].tolist() == list(range(N_POINTS))


@pytest.mark.slow
def test_the_number_of_points_of_a_curve_can_be_chosen(live, tmp_path):
    assert module.main([str(live), "--output", str(tmp_path), "--points", "2"]) == 0
    n_rows = pd.read_csv(tmp_path / "curves.csv.xz").groupby("run").size()
    assert len(n_rows) > 1 and n_rows.max() == 2
    # Runs that only the pack has are not thinned further
    kept = pd.read_csv(tmp_path / "curves.csv.xz")
    other = tmp_path / "other"
    shutil.copytree(live / "part" / "Acrobot-v1", other / "Acrobot-v1")
    assert module.main([str(other), "--output", str(tmp_path), "--points", "1", "--add"]) == 0
    added = pd.read_csv(tmp_path / "curves.csv.xz")
    assert added.groupby("run").size().max() == 2 and set(kept["run"]) <= set(added["run"])
    # Nor is the only copy of curves
    (other / "Acrobot-v1" / "all-action_seed-0" / "curves.csv").unlink()
    assert module.main([str(other), "--output", str(tmp_path), "--points", "1", "--add"]) == 0
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "curves.csv.xz"), added)
    with pytest.raises(SystemExit, match="pack: `points` must be an integer, at least 1, but 0 was given"):
        module.main([str(live), "--output", str(tmp_path), "--points", "0"])


def test_the_command_of_a_run_gives_that_run(tmp_path):
    settings = dict(n_timesteps=7, eval_freq=5, stop_return=18.5, n_eval_episodes=2, deterministic=True, native=False)
    settings.update(eval_from=-20.0, dtype=None, n_threads=2, device="cpu", wandb="disabled")
    config = tmp_path / "mine.yml"
    config.write_text("{}")
    for run in (
        make_grid("CartPole-v1", ["task2"], [3], tmp_path)[0],
        make_grid("BreakoutNoFrameskip-v4", ["a2c"], [0], tmp_path, **settings)[0],
        make_grid("BreakoutNoFrameskip-v4", ["a2c"], [0], tmp_path, dtype="bfloat16")[0],
        make_grid("BreakoutNoFrameskip-v4", ["a2c"], [0], tmp_path, stop_return=1234567.5, eval_from=0.0)[0],
        make_grid("CartPole-v1", ["all-action"], [0], tmp_path, hyperparams={"n_envs": 4, "learning_rate": "lin_1e-3"})[0],
    ):
        words = shlex.split(command_of(dataclasses.asdict(run)))
        assert words[:3] == ["python", "-m", "sb3_qac"]
        (again,) = grid_of(make_parser().parse_args(words[3:]), tmp_path)
        assert again == run
    # A search may change what the name of an algorithm says
    assert command_of({**dataclasses.asdict(run), "hyperparams": {"n_envs": 4, "beta": 0.5}}) == ""
    whole = command_of({**dataclasses.asdict(run), "stop_return": 18.0, "eval_from": 15.0})
    assert " --stop-return 18 --eval-freq 300000 --eval-from 15 " in whole
    assert "--conf-file mine.yml" in command_of({**dataclasses.asdict(run), "config": str(config)})


@pytest.mark.slow
def test_a_run_of_a_lost_machine_is_marked(live, tmp_path):
    parts = load_everything(live)
    with pytest.raises(ValueError, match="a2c_seed-0 finished, so nothing of it was lost: leave it out of `--lost`"):
        write_pack(parts, tmp_path, lost=["a2c_seed-0"])
    write_pack(with_unfinished(parts, "a2c_seed-0"), tmp_path, lost=["a2c_seed-0"])
    record = load_study(tmp_path)["CartPole-v1"]["a2c"][0]
    assert record.state == "lost" and not record.finished
    assert "| a2c_seed-0 | lost |" in markdown(load_study(tmp_path), None)
    with pytest.raises(ValueError, match="There is no run a2c_seed-7 among a2c_seed-0"):
        write_pack(load_everything(live), tmp_path, lost=["a2c_seed-7"])


@pytest.mark.slow
def test_a_part_in_a_hidden_folder_is_found(live, tmp_path):
    shutil.copytree(live / "a2c_seed-0", tmp_path / "study" / ".old" / "a2c_seed-0")
    write_pack(load_everything(tmp_path / "study"), tmp_path / "packed")
    assert list(load_study(tmp_path / "packed" / ".old")["CartPole-v1"]) == ["a2c"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_noise")
def test_the_ladder_has_the_same_page_when_it_is_packed(tmp_path):
    settings = dict(n_timesteps=1600, eval_freq=800, n_eval_episodes=2, wandb="disabled", device="cpu")
    assert run_study(make_grid("ladder", ["dqn", "task1"], [0], tmp_path / "ladder", **settings)) == {}
    page = write_page(tmp_path / "ladder").read_text()
    # The page has measured the noise of the gradient
    assert load_run(tmp_path / "ladder" / "task1_seed-0").metrics["variance"] > 0
    write_pack(load_everything(tmp_path / "ladder"), tmp_path / "results")
    assert write_page(tmp_path / "results").read_text() == page


@pytest.mark.parametrize("command", [["report", "FOLDER"], ["evaluate", "FOLDER"], ["export", "FOLDER", "o"]])
def test_a_folder_without_runs_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="There is no run of a study in"):
        main([str(tmp_path) if word == "FOLDER" else word for word in command])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_is_no_study(command, live, tmp_path):
    with pytest.raises(
        SystemExit, match=rf"{command}: .*a2c_seed-0 is a run of a study, not a study. Name the folder.*cartpole"
    ):
        COMMANDS[command]([str(live / "a2c_seed-0"), "--output", str(tmp_path / "out")])
    damaged = tmp_path / "study" / "a2c_seed-0" / "status.json"
    shutil.copytree(live / "a2c_seed-0", damaged.parent)
    damaged.write_text("{")
    with pytest.raises(SystemExit, match=rf"{command}: .*status.json is damaged: Expecting property name"):
        COMMANDS[command]([str(tmp_path / "study"), "--output", str(tmp_path / "out")])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_is_no_folder_for_the_output(command, live, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit, match=rf"^{command}: .*file cannot be made a folder \(File exists\). Name another one."):
        COMMANDS[command]([str(live), "--output", str(tmp_path / "file")])
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_cannot_be_written_is_no_output(command, live, tmp_path, monkeypatch):
    # The tests may run as a user who may write everywhere
    monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(SystemExit, match=rf"^{command}: .*out cannot be written \(Permission denied\)\. Name another one"):
        COMMANDS[command]([str(live), "--output", str(tmp_path / "out")])
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_a_part_that_is_not_in_the_data_is_refused(packed):
    with pytest.raises(ValueError, match=r"There is no run of a study in .*cartpole/other"):
        load_study(packed / "other")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("settings.json", None, "FileNotFoundError"),
        ("settings.json", b"{}", "KeyError"),
        ("settings.json", b"[]", "KeyError"),
        ("settings.json", b"3", "TypeError"),
        ("runs.csv", b"a,b\n1,2\n", "KeyError"),
        ("runs.csv", b"", "EmptyDataError"),
        ("evaluations.csv.xz", None, "there are no evaluations of a2c_seed-0"),
        ("evaluations.csv.xz", slice(0, 200), "EOFError"),
        ("evaluations.csv.xz", slice(30, None, -1), "LZMAError"),
        ("curves.csv.xz", lzma.compress(b"run,step")[:12] + b"no index" * 200, "LZMAError"),
    ],
)
def test_a_packed_study_with_a_damaged_file_is_refused_by_its_name(name, content, error, packed, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(packed, folder)
    if isinstance(content, slice):
        content = (folder / name).read_bytes()[content]
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(SystemExit, match=rf"^report: The packed study in .*damaged cannot be read, .*{error}"):
        main(["report", str(folder)])


def test_only_floats_are_rounded_to_six_digits():
    values = {"seconds": 1234567.8, "figures": [0.123456789, 2.5, None], "steps": 12345678, "commit": "12e4567"}
    assert rounded(values) == {**values, "seconds": 1234570.0, "figures": [0.123457, 2.5, None]}


@pytest.mark.slow
def test_diagnoses_are_plain_json(live, packed):
    with lzma.open(packed / "curves.csv.xz", "rt") as file:
        assert file.readline().startswith("run,step,")
    diagnosis = json.loads((packed / "diagnosis.json").read_text())
    assert diagnosis == {"all-action_seed-0": rounded(json.loads((live / "all-action_seed-0" / "diagnosis.json").read_text()))}
