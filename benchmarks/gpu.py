"""
Steps per second on a GPU and on the CPU of the same machine, native environments and bfloat16, all in one process:

    python -m benchmarks.gpu gpu.json
"""

import argparse
import json
import time
import traceback
from pathlib import Path

import torch as th

from benchmarks.speed import Contender, contender_model, machine_of, measure_parts, seconds_per_call
from sb3_qac.zoo import register

PONG, MINATAR = "PongNoFrameskip-v4", "MinAtar/Breakout-v1"
SECONDS = 3


def measure(algo, env_id=PONG, n_envs=16, device="cuda", threads=1, compiled=False):
    """:return: a row: steps per second of environments and training together"""
    th.set_num_threads(threads)
    contender = Contender(algo, "bfloat16" if env_id == PONG else "stock")
    with contender_model(contender, env_id, n_envs, device) as model:
        rollout = n_envs * model.n_steps
        steps = rollout * max(512 // model.n_steps, 1)
        seconds_to_compile = None
        if compiled:
            model.policy.features_extractor.compile(mode="reduce-overhead", dynamic=False)
            start = time.perf_counter()
            # CUDA graphs are recorded in the second call of each shape
            model.learn(4 * rollout, reset_num_timesteps=False)
            seconds_to_compile = time.perf_counter() - start
        speed = steps / seconds_per_call(lambda: model.learn(steps, reset_num_timesteps=False), SECONDS)
    row = dict(algo=algo, env=env_id, n_envs=n_envs, device=device, threads=threads, compiled=compiled, steps_per_second=speed)
    print({**row, "seconds_to_compile": seconds_to_compile}, flush=True)
    return {**row, "seconds_to_compile": seconds_to_compile}


def parts(algo, device):
    """:return: a row: milliseconds of the parts of a rollout and its update"""
    th.set_num_threads(1)
    row = dict(algo=algo, env=PONG, n_envs=16, device=device)
    with contender_model(Contender(algo, "bfloat16"), PONG, 16, device) as model:
        row.update(measure_parts(model, seconds=1))
    print(row, flush=True)
    return row


def main():
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__.partition(":")[0] + ".")
    parser.add_argument("output", type=Path, help="JSON file to write, after each measurement")
    path = parser.parse_args().output
    register()
    rows = []
    result = {**machine_of("cuda"), "torch": th.__version__, "seconds": SECONDS, "measurements": rows}

    def add(measurement, *args, **kwargs):
        # One that fails does not end the others
        try:
            rows.append(measurement(*args, **kwargs))
        except Exception as error:
            traceback.print_exc()
            rows.append({"measurement": [*args, kwargs], "error": repr(error)})
        # After each row: the machine may be gone before the last
        path.write_text(json.dumps(result, indent=1))

    for _ in range(2):
        for device in ("cuda", "cpu"):
            for algo in ("qa2c", "ppo", "qppo"):
                add(measure, algo, device=device)
        add(measure, "qppo", device="cpu", threads=8)
    for algo in ("qa2c", "ppo", "qppo"):
        add(measure, algo, n_envs=64)
        add(parts, algo, "cuda")
    for device in ("cuda", "cpu"):
        add(measure, "qppo", MINATAR, 64, device)
    add(measure, "qppo", compiled=True)
    add(measure, "qa2c", compiled=True)
    add(measure, "qppo", n_envs=64, compiled=True)


if __name__ == "__main__":
    main()
