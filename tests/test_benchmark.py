"""The benchmark: what it measures is there, and its arithmetic is right."""

import json
import sys

import pytest

from sb3_qac.__main__ import main
from sb3_qac.study.benchmark import (
    BASELINE,
    CONTENDERS,
    contenders_of,
    measure_parts,
    measure_training,
    run_benchmark,
    tables,
    write_report,
)

PONG = "PongNoFrameskip-v4"


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_every_contender_is_measured(contender):
    training = measure_training(contender, PONG, n_envs=1, seconds=0.1, device="cpu")
    assert training["steps_per_second"] > 10 and training["peak_memory"] > 50
    parts = measure_parts(contender, PONG, n_envs=1, seconds=0.1, device="cpu")
    assert parts["limit"] == pytest.approx(1000 * 5 / (parts["environments"] + parts["forward"] + parts["update"]))


def test_on_vectors_qa2c_is_compared_with_a2c():
    contenders = contenders_of("CartPole-v1")
    assert contenders == (BASELINE, CONTENDERS[1])
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
    for round_, machine in enumerate((1, 1 / 2, 1 / 3)):
        for contender in CONTENDERS:
            speed = 600 * machine * (1 if contender is BASELINE else 2)
            rows.append(row(contender, round_, steps_per_second=speed, peak_memory=500 + round_))
            rows.append(row(contender, round_, limit=1200, environments=10, forward=20 + round_, update=30))
    report = dict(env_id=PONG, processor="CPU", cores=2, device="cpu", repeats=3, seconds=20, measurements=rows)
    text = "\n".join(tables(report))
    assert f"| {BASELINE.name} | 300 (200 - 600) | 1.00 (1.00 - 1.00) | 1200 | 25% | 501 MiB |" in text
    assert f"| {CONTENDERS[2].name} | 600 (400 - 1200) | 2.00 (2.00 - 2.00) | 1200 | 50% | 501 MiB |" in text
    assert f"| {BASELINE.name} | 10.0 | 21.0 | 30.0 |" in text
    write_report(report, tmp_path / "folder" / "report.json")
    assert json.loads((tmp_path / "folder" / "report.json").read_text()) == report


def test_without_a_figure_for_memory_the_table_says_so(monkeypatch):
    """As on Windows, where Python has no ``resource``."""
    monkeypatch.setitem(sys.modules, "resource", None)
    training = measure_training(BASELINE, PONG, n_envs=1, seconds=0.01, device="cpu")
    assert set(training) == {"steps_per_second"}
    parts = dict(limit=1200, environments=10, forward=20, update=30)
    rows = [row(contender, 0, **figures) for contender in CONTENDERS for figures in (training, parts)]
    report = dict(env_id=PONG, processor="CPU", cores=2, device="cpu", repeats=1, seconds=20, measurements=rows)
    assert "| not measured |" in "\n".join(tables(report))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "ALE/Pong-v5"], "ALE/Pong-v5 skips 4 frames itself"),
        (["--env", "PongNoFramskip-v4"], "Did you mean"),
        (["--seconds", "0"], "`seconds` must be a finite number, at least 0.01, but 0"),
        (["--env", "Pendulum-v1"], "^benchmark: .*must be `gymnasium.spaces.Discrete`"),
        (["--repeats", "0"], "`repeats` must be a finite number, at least 1, but 0"),
        (["--n-envs", "16", "0"], "`n_envs` must be a finite number, at least 1, but 0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(arguments, message, monkeypatch):
    monkeypatch.setattr("sb3_qac.study.benchmark.get_context", lambda method: pytest.fail("A measurement began"))
    with pytest.raises(SystemExit, match=message):
        main(["benchmark", *arguments])


@pytest.mark.slow
def test_benchmark_measures_everything_in_every_round():
    report = run_benchmark(PONG, [1, 2], seconds=0.1, repeats=2, device="cpu")
    assert len(report["measurements"]) == 2 * 2 * 2 * len(CONTENDERS)
    assert {(row["round"], row["n_envs"]) for row in report["measurements"]} == {(0, 1), (0, 2), (1, 1), (1, 2)}
    assert "2 environments" in "\n".join(tables(report))
