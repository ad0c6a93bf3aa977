"""
Follows one state of IdentityEnv(4) over a run, and writes a row for each 300 steps.

    python -m benchmarks.qa2c_shrinkage.stuck > stuck.csv
"""

import csv
import sys

import torch as th
from stable_baselines3.common.envs import IdentityEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.qa2c_shrinkage.trials import CANDIDATES, IDENTITY, RMSPROP
from sb3_qac import QA2C
from sb3_qac.common.losses import corrected_advantages, state_values

STATE, SEED = 0, 0
COLUMNS = ["candidate", "step", "times_taken", "pi", "advantage", "state_value", "gradient_of_sum", "gradient_of_correction"]


class Followed(QA2C):
    """Adds up the gradients on the logit of the right action of ``STATE``, its parts apart."""

    taken, of_sum, of_correction = 0, 0.0, 0.0

    def train(self):
        (data,) = self.rollout_buffer.get()
        with th.no_grad():
            q_values, log_probs = self.policy.evaluate_all_actions(data.observations)
            values, actions = state_values(log_probs.exp(), q_values), data.actions.long()
            weights, td_errors = corrected_advantages(
                q_values, values, log_probs, actions, data.returns.unsqueeze(1), self.shrinkage
            )
            probs, right = log_probs.exp(), (actions == STATE).float()
            here = (data.observations.flatten() == STATE).float().unsqueeze(1)
            mean_weight = (probs * weights).sum(dim=1, keepdim=True)
            p = probs[:, STATE : STATE + 1]
            self.of_sum += (here * p * (weights[:, STATE : STATE + 1] - mean_weight)).mean().item()
            self.of_correction += (here * td_errors * (right - p)).mean().item()
            self.taken += int((here * right).sum())
        super().train()
        if self.num_timesteps % 300 == 0:
            with th.no_grad():
                q_values, log_probs = self.policy.evaluate_all_actions(th.tensor([STATE]))
                value = state_values(log_probs.exp(), q_values)
            figures = log_probs.exp()[0, STATE], (q_values - value)[0, STATE], value, self.of_sum, self.of_correction
            writer.writerow([candidate, self.num_timesteps, self.taken, *(f"{float(figure):.3g}" for figure in figures)])


writer = csv.writer(sys.stdout, lineterminator="\n")
writer.writerow(COLUMNS)
for candidate in ("beta 1", "shrinkage 1", "dueling"):
    changes = dict(CANDIDATES[candidate])
    steps, arguments = IDENTITY["IdentityEnv, 3,000 steps"]
    policy_kwargs = {**RMSPROP, "dueling": changes.pop("dueling", False)}
    env = DummyVecEnv([lambda: IdentityEnv(4)])
    th.set_num_threads(1)
    arguments = {**arguments, **changes, "policy_kwargs": policy_kwargs, "pg_coef": 1.0, "seed": SEED, "device": "cpu"}
    Followed("MlpPolicy", env, **arguments).learn(steps)
