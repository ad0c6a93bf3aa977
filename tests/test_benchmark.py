"""The benchmark: what it measures is there, and its arithmetic is right."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch as th

from sb3_qac.__main__ import main
from sb3_qac.common.torch_layers import LeanNatureCNN
from sb3_qac.study import benchmark, until_return
from sb3_qac.study.benchmark import (
    Contender,
    contenders_of,
    machine_of,
    measure_parts,
    measure_training,
    run_benchmark,
    tables,
    write_report,
)
from sb3_qac.study.callbacks import StatusCallback
from sb3_qac.study.catalogue import BENCHMARKED, VARIANTS

PONG = "PongNoFrameskip-v4"
CONTENDERS = contenders_of(PONG)
# With one environment the rollout is smaller than the minibatch
ONE_ENVIRONMENT = pytest.mark.filterwarnings("ignore:`batch_size` is", "ignore:You have specified a mini-batch size")


@ONE_ENVIRONMENT
@pytest.mark.parametrize(
    ("algo", "variant", "n_steps"),
    [("a2c", "stock", 5), ("qa2c", "bfloat16", 5), ("ppo", "float32", 128), ("qppo", "bfloat16", 64)],
)
def test_contenders_are_measured_with_the_rollouts_of_their_presets(algo, variant, n_steps):
    contender = Contender(algo, variant)
    training = measure_training(contender, PONG, n_envs=1, seconds=0.1, device="cpu")
    assert training["steps_per_second"] > 0 and training["peak_memory"] > 50
    parts = measure_parts(contender, PONG, n_envs=1, seconds=0.1, device="cpu")
    assert parts["limit"] == pytest.approx(1000 * n_steps / (parts["environments"] + parts["forward"] + parts["update"]))


def test_every_algorithm_is_compared_on_every_stack_of_atari(tmp_path):
    assert [(contender.algo, contender.variant) for contender in CONTENDERS] == [
        (algo, variant) for algo in BENCHMARKED for variant in VARIANTS
    ]
    assert len({contender.name for contender in CONTENDERS}) == len(CONTENDERS)
    assert CONTENDERS[0].name == "A2C, SB3's environments" and CONTENDERS[-1].name == "QPPO, native, bfloat16"
    stacks = [(run.native, run.dtype) for run in (contender.run(PONG, tmp_path) for contender in CONTENDERS[:3])]
    assert stacks == [(False, None), (True, "float32"), (True, "bfloat16")]
    # The settings of a study: this package's, and RL Zoo's for PPO
    assert [Contender(algo).preset(PONG) for algo in BENCHMARKED] == ["sb3_qac's", "sb3_qac's", "RL Zoo's", "sb3_qac's"]
    assert Contender("qppo").run(PONG, tmp_path, n_envs=3).hyperparams == {"n_envs": 3}


def test_variants_of_a_study_are_contenders_too(tmp_path):
    (contender,) = contenders_of("CartPole-v1", ["qppo-sampled"])
    assert contender.name == "qppo-sampled, SB3's environments"
    assert contender.run("CartPole-v1", tmp_path, 2).hyperparams == {"policy_gradient": "sampled", "n_envs": 2}


def test_variants_of_atari_are_refused_for_other_environments(tmp_path):
    assert contenders_of("CartPole-v1", ["a2c"], ["stock"]) == (Contender("a2c"),)
    command = ["benchmark", "--env", "CartPole-v1", "--output", str(tmp_path / "speed.json"), "--variants"]
    for variants in (["bfloat16"], ["stock", "bfloat16"]):
        with pytest.raises(SystemExit, match=r"CartPole-v1 is no Atari game, .* but bfloat16 was given"):
            main([*command, *variants])


def test_on_vectors_there_is_one_stack():
    contenders = contenders_of("CartPole-v1", ["a2c", "qppo", "a2c"])
    assert contenders == (Contender("a2c"), Contender("qppo"))
    measure = dict(env_id="CartPole-v1", n_envs=2, seconds=0.05, device="cpu")
    rows = [
        {"round": 0, "n_envs": 2, "contender": contender.name, **found(contender, **measure)}
        for contender in contenders
        for found in (measure_training, measure_parts)
    ]
    report = dict(env_id="CartPole-v1", processor="CPU", cores=2, device="cpu", repeats=1, seconds=0.05, measurements=rows)
    text = "\n".join(tables(report))
    assert all(f"| {contender.name} |" in text for contender in contenders) and "native" not in text


def row(contender, round_, **figures):
    return {"round": round_, "n_envs": 16, "contender": contender.name, **figures}


def test_table_compares_within_a_round_and_takes_medians(tmp_path):
    """Twice as fast in each round, though the machine was half as fast in the second and a third in the third."""
    rows = []
    baseline, other = CONTENDERS[:2]
    for round_, machine in enumerate((1, 1 / 2, 1 / 3)):
        for contender in (baseline, other):
            speed = 600 * machine * (1 if contender is baseline else 2)
            rows.append(row(contender, round_, steps_per_second=speed, peak_memory=500 + round_))
            rows.append(row(contender, round_, limit=1200, environments=10, forward=20 + round_, update=30))
    report = dict(env_id=PONG, processor="CPU", cores=2, device="cpu", repeats=3, seconds=20, measurements=rows)
    text = "\n".join(tables({**report, "presets": {baseline.name: "RL Zoo's"}}))
    assert f"| {baseline.name} | RL Zoo's | 300 (200 - 600) | 1.00 (1.00 - 1.00) | 1200 | 25% | 501 MiB |" in text
    # Earlier reports did not say whose settings they had
    assert f"| {other.name} | - | 600 (400 - 1200) | 2.00 (2.00 - 2.00) | 1200 | 50% | 501 MiB |" in text
    assert f"| {baseline.name} | 10.0 | 21.0 | 30.0 |" in text
    write_report(report, tmp_path / "folder" / "report.json")
    assert json.loads((tmp_path / "folder" / "report.json").read_text()) == report


def test_without_a_figure_for_memory_the_table_says_so(tmp_path, monkeypatch):
    """As on Windows, which has neither ``/proc`` nor Python's ``resource``."""
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(benchmark, "PROCESS_STATUS", tmp_path / "none")
    training = measure_training(Contender("a2c"), "CartPole-v1", n_envs=1, seconds=0.01, device="cpu")
    assert set(training) == {"steps_per_second"}
    parts = dict(limit=1200, environments=10, forward=20, update=30)
    rows = [row(Contender("a2c"), 0, **figures) for figures in (training, parts)]
    report = dict(env_id="CartPole-v1", processor="CPU", cores=2, device="cpu", repeats=1, seconds=20, measurements=rows)
    assert "| not measured |" in "\n".join(tables(report))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "ALE/Pong-v5"], "ALE/Pong-v5 skips 4 frames itself"),
        (["--env", "PongNoFramskip-v4"], "Did you mean"),
        (["--seconds", "0"], "`seconds` must be a finite number, at least 0.01, but 0"),
        (["--env", "Pendulum-v1", "--algos", "ppo"], "^benchmark: `env` must have discrete actions, but those of Pendulum-v1"),
        (["--algos", "reinforce"], "reinforce cannot be measured: it updates after whole episodes.*`--until-return`"),
        (["--seeds", "0", "1"], "--seeds is for the time to a return: give `--until-return` too"),
        (["--eval-freq", "10"], "--eval-freq is for the time to a return"),
        (["--until-return", "18", "--repeats", "3"], "--repeats is for the speed of training: leave `--until-return` out"),
        (["--repeats", "0"], "`repeats` must be a finite number, at least 1, but 0"),
        (["--n-envs", "16", "0"], "`n_envs` must be a finite number, at least 1, but 0"),
        (["--algos", "a2c", "qpppo"], "There is no algorithm qpppo. Did you mean ppo or qppo.* There are"),
        (["--algos", "dqn"], "dqn cannot be measured: only on-policy"),
        (["--until-return", "18", "--n-envs", "8", "16"], r"`n-envs` must be one number .*\[8, 16\]"),
        (["--until-return", "18", "--steps", "0"], "`steps` must be a finite number, at least 1, but 0"),
        (["--until-return", "18", "--n-envs", "0"], "`n_envs` must be a finite number, at least 1, but 0"),
        (["--until-return", "nan"], "`until_return` must be a finite number.*nan"),
        (["--output", "speed.runs"], "`output` must be a JSON file, but speed.runs"),
        (["--output", "."], "`output` must be a JSON file"),
        (
            ["--until-return", "18", "--eval-freq", "500", "--steps", "200"],
            r"`eval_freq` \(500\) must be at most `steps` \(200\)",
        ),
        (["--output", f"{__file__}/speed.json"], "cannot be made a folder"),
        (["--until-return", "18", "--eval-episodes", "0"], "`eval_episodes` must be a finite number, at least 1, but 0"),
        (["--until-return", "18", "--eval-freq", "-5"], "`eval_freq` must be a finite number, at least 1, but -5"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(arguments, message, monkeypatch):
    monkeypatch.setattr(benchmark, "get_context", lambda method: pytest.fail("A measurement began"))
    monkeypatch.setattr(until_return, "run_study", lambda runs: pytest.fail("A training began"))
    with pytest.raises(SystemExit, match=message):
        main(["benchmark", *arguments])


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "get_context", lambda method: pytest.fail("A measurement began"))
    # The tests may run as a user who may write everywhere
    refused = Mock(side_effect=PermissionError(13, "Permission denied"))
    for replaced, exists in (("tempfile.TemporaryFile", False), ("pathlib.Path.open", True)):
        output = tmp_path / f"{replaced}.json"
        if exists:
            output.touch()
        with monkeypatch.context() as patch:
            patch.setattr(replaced, refused)
            named = output if exists else tmp_path
            with pytest.raises(SystemExit, match=rf"^benchmark: {named} cannot be written \(Permission denied\)\."):
                main(["benchmark", "--output", str(output)])
        assert output.exists() == exists


def test_measurements_that_cannot_be_written_are_printed(tmp_path, monkeypatch, capsys):
    figures = dict.fromkeys(("steps_per_second", "limit", "environments", "forward", "update"), 7.0)
    monkeypatch.setattr(benchmark, "_in_process", lambda *settings: figures)
    monkeypatch.setattr(benchmark, "write_report", Mock(side_effect=OSError(28, "No space left on device")))
    command = ["benchmark", "--env", "CartPole-v1", "--algos", "a2c", "--output", str(tmp_path / "speed.json")]
    with pytest.raises(SystemExit, match=r"^benchmark: .*speed.json could not be written \(No space left on device\)\.$"):
        main(command)
    assert "| A2C, SB3's environments | RL Zoo's | 7 (7 - 7) |" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    write_report({"round": 1}, tmp_path / "speed.json")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_report({"round": 2}, tmp_path / "speed.json")
    assert json.loads((tmp_path / "speed.json").read_text()) == {"round": 1}


def be_killed(*args):
    os._exit(9)


def test_a_measurement_that_is_killed_is_told(monkeypatch):
    """As by the system when the memory is not enough."""
    monkeypatch.setattr(benchmark, "measure_training", be_killed)
    with pytest.raises(ValueError, match="The process that measured A2C, SB3's environments with 2 environments was killed"):
        run_benchmark("CartPole-v1", contenders_of("CartPole-v1", ["a2c"]), [2], seconds=0.1, repeats=1, device="cpu")


@pytest.mark.parametrize(("n_measured", "n_complete"), [(1, None), (7, None), (8, 1), (15, 1), (17, 2)])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), benchmark.KilledError("It was killed.")])
def test_after_ctrl_c_the_complete_rounds_are_kept(error, n_measured, n_complete, tmp_path, monkeypatch, capsys):
    """A round has two measurements of each of two algorithms with each of two numbers of environments."""
    n_left = iter(range(n_measured, -1, -1))

    def measured(measure, *settings):
        if next(n_left) == 0:
            raise error
        training = measure is measure_training
        return {"steps_per_second": 1.0} if training else dict.fromkeys(("limit", "environments", "forward", "update"), 1.0)

    monkeypatch.setattr(benchmark, "_in_process", measured)
    output = tmp_path / "speed.json"
    command = "benchmark --env CartPole-v1 --algos a2c ppo --n-envs 2 4 --repeats 3 --output".split()
    # The complete file of an earlier call
    output.write_text("{}")
    kept = tmp_path / "speed-interrupted.json"
    hint = f"{kept} has the complete rounds" if n_complete else ""
    if isinstance(error, KeyboardInterrupt):
        assert main([*command, str(output)]) == 130
        printed, errors = capsys.readouterr()
        assert errors.endswith(f"benchmark: interrupted; {hint}.\n" if hint else "benchmark: interrupted.\n")
    else:
        with pytest.raises(SystemExit) as stopped:
            main([*command, str(output)])
        printed = capsys.readouterr().out
        assert str(stopped.value) == "benchmark: It was killed." + (f" {hint}." if hint else "")
    assert output.read_text() == "{}"
    if n_complete is None:
        assert not kept.exists()
        return
    report = json.loads(kept.read_text())
    assert [row["round"] for row in report["measurements"]] == [0] * 8 + [1] * 8 * (n_complete - 1)
    assert f"{n_complete} rounds of 20 s, interrupted: complete rounds only" in printed
    assert "2 environments" in printed and "4 environments" in printed


def test_weights_are_prepared_once_for_the_forward_passes(monkeypatch):
    n_converted = []
    convert = LeanNatureCNN._convert
    monkeypatch.setattr(LeanNatureCNN, "_convert", lambda self, weights: n_converted.append(0) or convert(self, weights))
    n_before = []
    measure = benchmark._seconds_per_call

    def count(call, seconds):
        n_before.append(len(n_converted))
        found = measure(call, seconds)
        n_before.append(len(n_converted))
        return found

    monkeypatch.setattr(benchmark, "_seconds_per_call", count)
    measure_parts(Contender("a2c", "bfloat16"), PONG, n_envs=1, seconds=0.05, device="cpu")
    # The forward pass is measured first
    assert n_before[1] - n_before[0] == 1


@pytest.mark.parametrize(
    ("device", "used", "name"), [("auto", "cuda", "GPU cuda"), ("cuda:1", "cuda:1", "GPU cuda:1"), ("cpu", "cpu", "cpu")]
)
def test_the_device_that_is_used_is_named(device, used, name, monkeypatch):
    monkeypatch.setattr(benchmark, "get_device", lambda asked: th.device(used))
    monkeypatch.setattr(th.cuda, "get_device_name", lambda device: f"GPU {device}")
    assert machine_of(device)["device"] == name


@pytest.mark.slow
@ONE_ENVIRONMENT
def test_benchmark_measures_everything_in_every_round():
    contenders = contenders_of(PONG, ["a2c", "qppo"], ["stock", "bfloat16"])
    report = run_benchmark(PONG, contenders, [1, 2], seconds=0.1, repeats=2, device="cpu")
    assert len(report["measurements"]) == 2 * 2 * 2 * len(contenders)
    assert {(row["round"], row["n_envs"]) for row in report["measurements"]} == {(0, 1), (0, 2), (1, 1), (1, 2)}
    assert "2 environments" in "\n".join(tables(report)) and report["presets"][contenders[-1].name] == "sb3_qac's"


# ---- until a return ----


def test_trainings_stop_at_the_return_and_are_not_repeated(tmp_path, capsys, monkeypatch):
    settings = "--env CartPole-v1 --algos a2c qppo --steps 1500 --eval-freq 500 --eval-episodes 2 --seeds 3"
    command = ["benchmark", *settings.split(), "--output", str(tmp_path / "b.json"), "--json", "--until-return"]
    assert main([*command, "8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "b.json").read_text())
    assert {name: report[name] for name in ("env_id", "until_return", "steps", "n_envs", "eval_episodes")} == dict(
        env_id="CartPole-v1", until_return=8, steps=1500, n_envs=None, eval_episodes=2
    )
    # No episode of CartPole has less than 8 steps, so the first evaluation stops the training
    for measured in report["measurements"]:
        assert measured["reached"] and measured["steps"] == 500 // 8 * 8 and measured["seed"] == 3
        assert measured["seconds"] == pytest.approx(measured["training_seconds"] + measured["evaluation_seconds"])
        assert measured["training_seconds"] > 0 < measured["evaluation_seconds"]
    assert main([*command, "8"]) == 0
    assert json.loads(capsys.readouterr().out)["measurements"] == report["measurements"]
    # The trainings are a study's
    assert (tmp_path / "b.runs" / "stock" / "qppo_seed-3" / "run.json").is_file()
    with pytest.raises(SystemExit, match=r"other settings in .*`stop_return` is 9\.0, and was 8\.0.*`--output`"):
        main([*command, "9"])
    with monkeypatch.context() as patch:
        patch.setattr(th, "__version__", "2.0.0")
        with pytest.raises(SystemExit, match=r"`torch` is '2.0.0', and was .*seconds cannot be compared\. Choose another"):
            main([*command, "8"])
    monkeypatch.setattr(th, "get_num_threads", lambda: 77)
    with pytest.raises(
        SystemExit, match=r"`n_threads` is 77, and was \d+ in .*seconds cannot be compared.*set OMP_NUM_THREADS"
    ):
        main([*command, "8"])


@pytest.mark.parametrize(("steps", "reached"), [(200, True), (208, False)])
def test_a_return_that_is_reached_after_the_last_step_does_not_count(steps, reached, tmp_path):
    """The last rollout is completed, and evaluated."""
    run = Contender("ppo").run("CartPole-v1", tmp_path, stop_return=34.0, n_timesteps=200)
    status = dict(steps=256, seconds=3.0, evaluation_seconds=1.0, last_evaluation=dict(steps=steps, mean_return=40.0))
    Path(run.folder).mkdir(parents=True)
    Path(run.folder, "status.json").write_text(json.dumps(status))
    assert run.reached
    found = until_return.measured(run)
    assert found["reached"] == reached and found["last_return"] == 40 and found["steps"] == 256


def test_the_two_names_of_an_algorithm_are_one_contender():
    assert contenders_of("CartPole-v1", ["task1", "all-action"]) == contenders_of("CartPole-v1", ["all-action"])


def test_a_training_that_failed_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(until_return, "run_study", lambda runs: {runs[0].folder: "ValueError: broken"})
    with pytest.raises(SystemExit, match=r"^benchmark: .*qppo_seed-0 failed: ValueError: broken"):
        main(
            [
                "benchmark",
                "--env",
                "CartPole-v1",
                "--algos",
                "qppo",
                "--until-return",
                "9",
                "--output",
                str(tmp_path / "b.json"),
            ]
        )


def test_what_was_not_reached_counts_as_infinite():
    figures = dict(training_seconds=30.0, evaluation_seconds=10.0, seconds=40.0)
    rows = [
        *({"contender": "A", "reached": steps < 4000, "steps": steps, **figures} for steps in (1000, 3000, 4000)),
        *({"contender": "B", "reached": steps < 4000, "steps": steps, **figures} for steps in (2000, 4000, 4000)),
        {"contender": "C", "reached": True, "steps": 2000, **figures},
    ]
    report = dict(env_id="X", until_return=18.0, steps=4000, eval_freq=500, processor="CPU", cores=2, device="cpu")
    report.update(n_envs=4, eval_episodes=30)
    text = "\n".join(until_return.tables({**report, "presets": dict.fromkeys("ABC", "RL Zoo's"), "measurements": rows}))
    seconds = " | ".join(f"{x:.1f} ({x:.1f} - not reached)" for x in (30, 10, 40))
    assert f"| A | RL Zoo's | 2 of 3 | 3,000 (1,000 - not reached) | {seconds} |" in text
    assert "| B | RL Zoo's | 1 of 3 | - | - | - | - |" in text
    assert "| C | RL Zoo's | 1 of 1 | 2,000 | 30.0 | 10.0 | 40.0 |" in text
    assert (
        "X until an evaluation returns 18, at most 4,000 steps, evaluated every 500 with 30 episodes, 4 environments." in text
    )


def test_the_time_of_evaluations_is_told_from_that_of_training(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("sb3_qac.study.callbacks.time", SimpleNamespace(monotonic=lambda: now[0]))
    evaluation = SimpleNamespace(evaluations_timesteps=[], evaluations_results=[])

    def callback(n_steps, restored=None):
        made = StatusCallback(tmp_path / "status.json", evaluation)
        vars(made).update(restored or {})
        made.model = SimpleNamespace(num_timesteps=n_steps, _total_timesteps=10, ep_info_buffer=None)
        made._on_training_start()
        return made

    def evaluate():
        evaluation.evaluations_timesteps.append(1)
        evaluation.evaluations_results.append([1.0])

    status = callback(0)
    for seconds, event in ((1, "step"), (3, "evaluation"), (6, "update"), (2, "evaluation"), (1, "step")):
        now[0] += seconds
        if event == "evaluation":
            evaluate()
        status._on_rollout_start() if event == "update" else status._on_step()
    status.write(finished=False)
    written = json.loads((tmp_path / "status.json").read_text())
    assert (written["seconds"], written["evaluation_seconds"]) == (13, 3 + 2)
    # Resumed, after a checkpoint, two seconds in which the process was killed, and a pause
    checkpoint = {name: value for name, value in vars(status).items() if isinstance(value, (int, float))}
    now[0] += 2
    status._on_step()
    status.write(finished=False)
    now[0] += 100
    status = callback(5, checkpoint)
    now[0] += 4
    evaluate()
    status._on_step()
    status.write(finished=True)
    written = json.loads((tmp_path / "status.json").read_text())
    assert (written["seconds"], written["evaluation_seconds"]) == (13 + 4, 5 + 4)
    # From a checkpoint of an early version
    status = callback(5, {"before": 7.0, "start": now[0]})
    status.write(finished=False)
    assert json.loads((tmp_path / "status.json").read_text())["seconds"] == 7
