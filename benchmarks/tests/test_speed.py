"""The speed benchmark: what it measures is there, and its arithmetic is right."""

import json
import os
import sys

import pytest

from benchmarks import speed
from benchmarks.speed import Contender, contender_model, contenders_of, main, measure, measure_parts, measurements, tables

PONG = "PongNoFrameskip-v4"
# With one environment the rollout is smaller than the minibatch
ONE_ENVIRONMENT = pytest.mark.filterwarnings("ignore:`batch_size` is", "ignore:You have specified a mini-batch size")


@pytest.mark.slow
@ONE_ENVIRONMENT
@pytest.mark.parametrize(
    ("algo", "variant", "n_steps"),
    [("a2c", "stock", 5), ("qppo", "bfloat16", 64)],
)
def test_contenders_are_measured_with_the_rollouts_of_their_presets(algo, variant, n_steps):
    found = measure(Contender(algo, variant), PONG, n_envs=1, seconds=0.1, device="cpu", parts=True)
    assert found["steps_per_second"] > 0 and found["peak_memory"] > 50
    assert found["limit"] == pytest.approx(1000 * n_steps / (found["environments"] + found["forward"] + found["update"]))


def test_algorithms_are_compared_on_stacks_of_atari(tmp_path):
    contenders = contenders_of(PONG, ["a2c", "task1"], speed.VARIANTS)
    assert [(x.algo, x.variant) for x in contenders] == [(a, v) for a in ("a2c", "all-action") for v in speed.VARIANTS]
    assert contenders[0].name == "A2C, SB3's environments" and contenders[-1].name == "all-action, native, bfloat16"
    stacks = [(run.native, run.dtype) for run in (contender.run(PONG, tmp_path) for contender in contenders[:3])]
    assert stacks == [(False, None), (True, "float32"), (True, "bfloat16")]
    # The settings of a study: this package's, and RL Zoo's for PPO
    assert [Contender(algo).preset(PONG) for algo in ("a2c", "qppo", "ppo")] == ["sb3_qac's", "sb3_qac's", "RL Zoo's"]
    assert Contender("qppo").run(PONG, tmp_path, n_envs=3).hyperparams == {"n_envs": 3}


def test_on_vectors_there_is_one_stack(tmp_path):
    assert contenders_of("CartPole-v1", ["a2c", "qppo", "a2c"], speed.VARIANTS) == (Contender("a2c"), Contender("qppo"))
    (contender,) = contenders_of("CartPole-v1", ["qppo-sampled"], ["stock"])
    assert contender.run("CartPole-v1", tmp_path, 2).hyperparams == {"policy_gradient": "sampled", "n_envs": 2}


def row(contender, round_, **figures):
    return {"round": round_, "n_envs": 16, "contender": contender, "settings": "RL Zoo's", **figures}


def test_table_compares_within_a_round_and_takes_medians():
    """Twice as fast in each round, though the machine was half as fast in the second and a third in the third."""
    rows = []
    for round_, machine in enumerate((1, 1 / 2, 1 / 3)):
        parts = dict(limit=1200, environments=10, forward=20 + round_, update=30)
        rows.append(row("one", round_, steps_per_second=600 * machine, peak_memory=500 + round_, **parts))
        rows.append(row("other", round_, steps_per_second=1200 * machine, **parts))
    # It was stopped before the second contender of the last round
    rows.append(row("one", 3, steps_per_second=300, peak_memory=501, **parts))
    text = "\n".join(tables(rows))
    assert "| one | RL Zoo's | 300 (200 - 600) | 1.00 (1.00 - 1.00) | 501 MiB |" in text
    # As on Windows, which has neither ``/proc`` nor Python's ``resource``
    assert "| other | RL Zoo's | 600 (400 - 1200) | 2.00 (2.00 - 2.00) | not measured |" in text
    assert "| other | 10.0 | 21.0 | 30.0 | 1200 |" in text
    assert list(tables([])) == []


def test_without_a_figure_for_memory_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(speed, "PROCESS_STATUS", tmp_path / "none")
    assert set(measure(Contender("a2c"), "CartPole-v1", n_envs=1, seconds=0.01, device="cpu")) == {"steps_per_second"}


def test_parts_of_a_model_are_measured_alone():
    with contender_model(Contender("a2c"), "CartPole-v1", 2, "cpu") as model:
        assert set(measure_parts(model, 0.01)) == {"environments", "forward", "update", "limit"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "ALE/Pong-v5"], "ALE/Pong-v5 skips 4 frames itself"),
        (["--env", "PongNoFramskip-v4"], "Did you mean"),
        (["--seconds", "0"], "`seconds` must be a finite number, at least 0.01, but 0"),
        (["--env", "Pendulum-v1", "--algos", "ppo"], "^speed: `env` must have discrete actions, but those of Pendulum-v1"),
        (["--algos", "reinforce"], "reinforce cannot be measured: it updates after whole episodes"),
        (["--repeats", "0"], "`repeats` must be a finite number, at least 1, but 0"),
        (["--n-envs", "16", "0"], "`n-envs` must be a finite number, at least 1, but 0"),
        (["--algos", "a2c", "qpppo"], "There is no algorithm qpppo. Did you mean ppo or qppo.* There are"),
        (["--algos", "dqn"], "dqn cannot be measured: only on-policy"),
        (["--output", "."], "[Ii]s a directory|is a folder"),
        (["--output", f"{__file__}/speed.json"], "cannot be made a folder"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(arguments, message, monkeypatch):
    monkeypatch.setattr(speed, "get_context", lambda method: pytest.fail("A measurement began"))
    with pytest.raises(SystemExit, match=message):
        main(arguments)


def be_killed(*args, **kwargs):
    os._exit(9)


@pytest.mark.slow
def test_a_measurement_that_is_killed_is_told(monkeypatch):
    """As by the system when the memory is not enough."""
    monkeypatch.setattr(speed, "measure", be_killed)
    with pytest.raises(ValueError, match="The process that measured A2C, SB3's environments with 2 environments was killed"):
        next(measurements("CartPole-v1", [Contender("a2c")], [2], 1, seconds=0.1, device="cpu"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("It was killed.")])
def test_each_measurement_is_written_as_it_comes(error, tmp_path, monkeypatch, capsys):
    output = tmp_path / "speed.jsonl"

    def measured(*args, **settings):
        yield row("A2C", 0, steps_per_second=100.0)
        assert len(output.read_text().splitlines()) == 2
        yield row("QPPO", 0, steps_per_second=200.0)
        raise error

    monkeypatch.setattr(speed, "measurements", measured)
    with pytest.raises(SystemExit, match=r"^speed: (interrupted; .*speed.jsonl has what was measured|It was killed)\.$"):
        main(["--env", "CartPole-v1", "--algos", "a2c", "qppo", "--output", str(output)])
    machine, *rows = map(json.loads, output.read_text().splitlines())
    assert machine["env_id"] == "CartPole-v1" and "torch" in machine["versions"]
    assert [(x["contender"], x["steps_per_second"]) for x in rows] == [("A2C", 100.0), ("QPPO", 200.0)]
    assert "| QPPO | RL Zoo's | 200 | 2.00 | not measured |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_whole_benchmark(tmp_path, capsys):
    output = tmp_path / "speed.jsonl"
    assert main(f"--env CartPole-v1 --algos a2c --n-envs 2 --seconds 0.05 --repeats 1 --output {output}".split()) == 0
    assert len(output.read_text().splitlines()) == 2 and "2 environments:" in capsys.readouterr().out
