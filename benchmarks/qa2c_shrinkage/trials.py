"""
Trains QA2C with one candidate after the other, and writes a line of JSON for each run.

    python -m benchmarks.qa2c_shrinkage.trials trials.jsonl --tasks "IdentityEnv, 3,000 steps" --seeds 10 --candidates dueling
"""

import argparse
import json
from pathlib import Path

import torch as th
import yaml
from stable_baselines3 import A2C
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import IdentityEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_qac import QA2C
from sb3_qac.zoo import presets

CANDIDATES = {
    "a2c": {},
    "beta 0": {"beta": 0.0},
    "beta 1": {"beta": 1.0},
    "shrinkage 0.1": {"beta": 1.0, "shrinkage": 0.1},
    "shrinkage 1": {"beta": 1.0, "shrinkage": 1.0},
    "dueling, beta 0": {"beta": 0.0, "dueling": True},
    "dueling": {"beta": 1.0, "dueling": True},
    "dueling, shrinkage 0.1": {"beta": 1.0, "shrinkage": 0.1, "dueling": True},
    "dueling, shrinkage 1": {"beta": 1.0, "shrinkage": 1.0, "dueling": True},
}
IDENTITY = {
    "IdentityEnv, 3,000 steps": (3_000, dict(gamma=0.95, learning_rate=1e-3)),
    "IdentityEnv, 1,200 steps": (1_200, dict(gamma=0.4, learning_rate=2e-3)),
}
RMSPROP = dict(optimizer_class=th.optim.RMSprop, optimizer_kwargs=dict(alpha=0.99, eps=1e-5))
STEPS, EPISODES = 60_000, 100


def identity_run(task, seed, candidate):
    """:return: how many of the four states have the right action as the most probable one, and its mean probability"""
    steps, arguments = IDENTITY[task]
    env = DummyVecEnv([lambda: IdentityEnv(4)])
    if candidate == "a2c":
        model = A2C("MlpPolicy", env, seed=seed, device="cpu", **arguments)
    else:
        changes = dict(CANDIDATES[candidate])
        policy_kwargs = {**RMSPROP, "dueling": changes.pop("dueling", False)}
        model = QA2C(
            "MlpPolicy", env, pg_coef=1.0, policy_kwargs=policy_kwargs, seed=seed, device="cpu", **arguments, **changes
        )
    model.learn(steps)
    with th.no_grad():
        probs = model.policy.get_distribution(th.arange(4)).distribution.probs
    return {"right": int((probs.argmax(1) == th.arange(4)).sum()), "probability": float(probs.diagonal().mean())}


def preset_run(env_id, seed, candidate):
    """:return: mean return of new episodes, with sampled and with greedy actions"""
    preset = yaml.safe_load(presets("qa2c").read_text())[env_id]
    del preset["n_timesteps"]
    changes = dict(CANDIDATES[candidate])
    policy_kwargs = {**eval(preset.pop("policy_kwargs", "dict()"), {"th": th}), "dueling": changes.pop("dueling", False)}
    env = make_vec_env(env_id, preset.pop("n_envs"), seed=seed)
    model = QA2C(env=env, policy_kwargs=policy_kwargs, seed=seed, device="cpu", **{**preset, **changes})
    model.learn(STEPS)
    returns = {}
    for actions in ("sampled", "greedy"):
        env = make_vec_env(env_id, 10, seed=1000 + seed)
        returns[actions] = float(evaluate_policy(model, env, EPISODES, deterministic=actions == "greedy")[0])
    return returns


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, required=True)
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, required=True)
    args = parser.parse_args()
    th.set_num_threads(1)
    for seed in args.seeds:
        for task in args.tasks:
            for candidate in args.candidates:
                run = identity_run if task in IDENTITY else preset_run
                row = {"task": task, "seed": seed, "candidate": candidate, **run(task, seed, candidate)}
                with args.output.open("a") as file:
                    print(json.dumps(row), file=file, flush=True)
