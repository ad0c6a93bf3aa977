"""A study on a Ray cluster of two nodes on this machine, one of which is lost in the middle."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sb3_qac.common.files import read_json
from sb3_qac.resume.checkpoints import checkpoints_in
from sb3_qac.study.grid import make_grid, run_on_ray, run_study

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SETTINGS = dict(n_timesteps=60_000, eval_freq=10_000, n_eval_episodes=3, wandb="disabled", device="cpu")


@pytest.fixture
def cluster():
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # The head has no CPUs: all runs are on the two other nodes
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield cluster
    cluster.shutdown()


def test_the_runs_of_a_lost_node_go_on_elsewhere_from_their_checkpoints(cluster, tmp_path):
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    cluster.wait_for_nodes()
    runs = make_grid("cartpole", ["a2c", "task1"], [0, 1], tmp_path / "ray", **SETTINGS)
    results = run_on_ray(runs, cluster.address)
    # The generator runs in this process: let a thread wait for it while the node is lost
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(lambda: {run.folder: error for run, error in results})
        deadline = time.monotonic() + 240
        while not all(checkpoints_in(Path(run.folder, "checkpoints")) for run in runs):
            assert time.monotonic() < deadline, "no checkpoints"
            time.sleep(0.5)
        before = [read_json(Path(run.folder, "status.json"))["steps"] for run in runs]
        assert max(before) < SETTINGS["n_timesteps"]
        cluster.remove_node(nodes[0], allow_graceful=False)
        assert outcome.result(timeout=400) == dict.fromkeys([run.folder for run in runs])

    undisturbed = make_grid("cartpole", ["a2c", "task1"], [0, 1], tmp_path / "here", **SETTINGS)
    assert run_study(undisturbed, jobs=2) == {}
    for run, other in zip(runs, undisturbed, strict=True):
        assert run.finished
        one, two = (np.load(Path(r.folder, "evaluations.npz")) for r in (run, other))
        np.testing.assert_array_equal(one["timesteps"], two["timesteps"])
        np.testing.assert_array_equal(one["results"], two["results"])
    # Nothing is left to do, so nothing is run
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "ray").rglob("status.json")}
    assert run_study(runs, ray_address=cluster.address) == {}
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "ray").rglob("status.json")}


def test_the_command_line_runs_on_a_cluster(cluster, tmp_path):
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    command = [sys.executable, "-m", "sb3_qac", "study", "cartpole", "--algos", "task1", "--seeds", "0", "--steps", "2000"]
    command += ["--wandb", "disabled", "--ray", cluster.address, "--output", "study", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["study/task1_seed-0"]["finished"]


@pytest.mark.parametrize(
    ("address", "message"), [("127.0.0.1:1", "no Ray cluster at 127"), ("nonsense", "HOST:PORT"), ("auto", "Ray")]
)
def test_no_cluster_is_said_in_a_line(address, message, tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "sb3_qac", "study", "cartpole", "--ray", address, "--output", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1 and message in result.stderr and "Traceback" not in result.stderr
