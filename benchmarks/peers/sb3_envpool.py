"""
SB3's A2C or PPO on EnvPool's Pong, with RL Zoo's settings: ``python benchmarks/peers/sb3_envpool.py a2c 100000``. It needs
``pip install envpool``.
"""

import argparse
import time

import envpool
import numpy as np
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

# RL Zoo's hyperparams/a2c.yml and ppo.yml, "atari"
N_ENVS = {"a2c": 16, "ppo": 8}
SETTINGS = {
    "a2c": dict(
        n_steps=5,
        ent_coef=0.01,
        vf_coef=0.25,
        policy_kwargs=dict(optimizer_class=RMSpropTFLike, optimizer_kwargs=dict(eps=1e-5)),
    ),
    "ppo": dict(
        n_steps=128,
        n_epochs=4,
        batch_size=256,
        learning_rate=LinearSchedule(2.5e-4, 0.0, 1.0),
        clip_range=LinearSchedule(0.1, 0.0, 1.0),
        vf_coef=0.5,
        ent_coef=0.01,
    ),
}


class EnvPoolVecEnv(VecEnv):
    """EnvPool's environments as a ``VecEnv``. They take one step to reset themselves, as EnvPool does."""

    def __init__(self, n_envs: int, seed: int) -> None:
        self.pool = envpool.make_gymnasium("Pong-v5", num_envs=n_envs, episodic_life=True, reward_clip=True, seed=seed)
        self.render_mode = None
        super().__init__(n_envs, self.pool.observation_space, self.pool.action_space)

    def reset(self):
        return self.pool.reset()[0]

    def step_async(self, actions):
        self.pool.send(np.asarray(actions, dtype=np.int32))

    def step_wait(self):
        observations, rewards, terminated, truncated, _ = self.pool.recv()
        dones = terminated | truncated
        infos = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(dones):
            infos[i] = {"terminal_observation": observations[i], "TimeLimit.truncated": bool(truncated[i])}
        return observations, rewards, dones, infos

    def close(self):
        self.pool.close()

    def get_attr(self, attr_name, indices=None):
        return [getattr(self, attr_name)] * self.num_envs

    def set_attr(self, attr_name, value, indices=None):
        raise NotImplementedError(f"The games run in C++: `{attr_name}` cannot be set on them.")

    def env_method(self, method_name, *args, indices=None, **kwargs):
        raise NotImplementedError(f"The games run in C++ and have no method `{method_name}`.")

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.num_envs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algo", choices=SETTINGS)
    parser.add_argument("steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    env = VecMonitor(EnvPoolVecEnv(N_ENVS[args.algo], args.seed))
    model = {"a2c": A2C, "ppo": PPO}[args.algo]("CnnPolicy", env, seed=args.seed, device="cpu", **SETTINGS[args.algo])
    start = time.perf_counter()
    model.learn(args.steps)
    print(f"{model.num_timesteps / (time.perf_counter() - start):.0f} steps/s")
