import copy
import warnings
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common import policies
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule, TensorDict
from stable_baselines3.common.utils import explained_variance, obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from sb3_qac.common.checks import (
    check_actions_from_zero,
    check_choice,
    check_finite,
    check_integer,
    check_max_grad_norm,
    check_number,
    check_observation_space,
    check_policy_class,
)
from sb3_qac.common.masks import MaskableOnPolicyAlgorithm, TellsMasks
from sb3_qac.common.returns import discounted_returns
from sb3_qac.reinforce.policies import CnnPolicy, MlpPolicy, MultiInputPolicy

SelfREINFORCE = TypeVar("SelfREINFORCE", bound="REINFORCE")


class Episodes(NamedTuple):
    """
    The steps of whole episodes.

    :param observations: Observations, shape (n_steps, ...)
    :param actions: Actions, shape (n_steps, ...)
    :param returns: Returns, which weight the log probability of each step, shape (n_steps,)
    :param n_episodes: Number of episodes
    :param action_masks: Action masks, shape (n_steps, n_values), or None without masks
    """

    observations: th.Tensor | TensorDict
    actions: th.Tensor
    returns: th.Tensor
    n_episodes: int
    action_masks: th.Tensor | None = None


class REINFORCE(MaskableOnPolicyAlgorithm):
    """
    REINFORCE, the Monte Carlo policy gradient.

    Paper: Williams 1992, https://doi.org/10.1007/BF00992696; the baseline: Sutton and Barto 2018, section 13.4

    With sums over the steps of an episode, and means over episodes, it minimizes::

        loss = - mean [ sum_t log pi(a_t|s_t) * w_t ]         w_t = G_t, or G_t - V(s_t) with the baseline, V held fixed
               - ent_coef * mean [ sum_t entropy of pi(.|s_t) ]
               + vf_coef  * mean [ sum_t (G_t - V(s_t))^2 ]   with the baseline only

    It does not bootstrap: G_t contains only the rewards of the episode, and an episode that a time limit cuts ends there.
    Every environment contributes the same number of whole episodes to an update. If an update took the first episodes to end,
    short ones would count too much. A ``VecEnv`` steps all environments at once, so an environment that has played its
    episodes is stepped until the others are done too. These extra steps count as environment steps (``num_timesteps``), but
    are left out of the update, ``rollout/ep_rew_mean`` and ``ep_len_mean``. Environments that are within an
    episode are reset before the next rollout, also where ``learn`` continues a run. So a ``Monitor`` must allow early
    resets, as it does by default. With native Atari environments, whose reset begins a new game, give
    ``terminal_on_life_loss=False``, or only the first life of each game is learned and no return of a game is reported.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy). These are SB3's; their V is the baseline
    :param env: The environment to learn from (if registered in Gym, can be str). Its episodes must end.
    :param learning_rate: The learning rate, it can be a function
        of the current progress remaining (from 1 to 0), or "lin_1e-3", RL Zoo's name of the schedule that falls linearly from
        1e-3 to 0
    :param n_episodes: Number of whole episodes that each environment contributes to an update
    :param gamma: Discount factor, between 0 and 1
    :param return_to_go: Whether G_t is the discounted sum of the rewards from t on. If False, it is the sum over the whole
        episode, for every step. The former leaves out rewards that the action cannot have caused.
    :param baseline: Whether to learn a baseline V(s)
    :param normalize_returns: Whether to shift and scale the weights w_t of an update to mean 0 and standard deviation 1; equal
        ones become 0
    :param ent_coef: Entropy coefficient for the loss calculation
    :param vf_coef: Value function coefficient for the loss calculation
    :param max_grad_norm: The maximum value for the gradient clipping, None or infinity for no clipping
    :param stats_window_size: Window size for the rollout logging, specifying the number of episodes to average
        the reported success rate, mean episode length, and mean reward over
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: additional arguments to be passed to the policy on creation
    :param verbose: Verbosity level: 0 for no output, 1 for info messages (such as device or wrappers used), 2 for
        debug messages
    :param seed: Seed for the pseudo random generators
    :param device: Device (cpu, cuda, ...) on which the code should be run.
        Setting it to auto, the code will be run on the GPU if possible.
    :param _init_setup_model: Whether or not to build the network at the creation of the instance
    :raises ValueError: for an argument or a space that cannot be used
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: float | str | Schedule = 1e-3,
        n_episodes: int = 1,
        gamma: float = 0.99,
        return_to_go: bool = True,
        baseline: bool = False,
        normalize_returns: bool = False,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ) -> None:
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,  # type: ignore[arg-type]
            # Episodes have no fixed length: SB3's buffer stays unused
            n_steps=1,
            gamma=gamma,
            gae_lambda=1.0,
            ent_coef=ent_coef,
            vf_coef=vf_coef,
            max_grad_norm=max_grad_norm,  # type: ignore[arg-type]
            use_sde=False,
            sde_sample_freq=-1,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            device=device,
            seed=seed,
            _init_setup_model=False,
            supported_action_spaces=(spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary),
        )
        self.n_episodes = n_episodes
        self.return_to_go = return_to_go
        self.baseline = baseline
        self.normalize_returns = normalize_returns
        self._episodes: Episodes | None = None

        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        check_policy_class(self.policy_class, ActorCriticPolicy, self.policy_aliases)
        check_actions_from_zero(self.action_space)
        check_observation_space(self.observation_space, issubclass(self.policy_class, policies.MultiInputActorCriticPolicy))
        check_integer("n_episodes", self.n_episodes, minimum=1)
        check_number("gamma", self.gamma, maximum=1)
        for name in ("return_to_go", "baseline", "normalize_returns"):
            check_choice(name, getattr(self, name), (False, True))
        for name in ("ent_coef", "vf_coef"):
            check_number(name, getattr(self, name))
        self.max_grad_norm = check_max_grad_norm(self.max_grad_norm)
        super()._setup_model()

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_episodes"]

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """
        Play ``n_episodes`` whole episodes in each environment.

        :param env: The training environment
        :param callback: Callback that will be called at each step
            (and at the beginning and end of the rollout)
        :param rollout_buffer: (unused, for algorithms with a fixed number of steps)
        :param n_rollout_steps: (unused, for algorithms with a fixed number of steps)
        :return: True if all episodes ended; False if the callback or the number of timesteps ended the run earlier
        """
        assert self._last_episode_starts is not None, "No previous observation was provided"
        # Switch to eval mode (this affects batch norm / dropout)
        self.policy.set_training_mode(False)
        with self._masking(env, callback, rollout_buffer) as around:
            return self._play(env, around)

    def _play(self, env: VecEnv, callback: BaseCallback) -> bool:
        """
        :param env: Environments
        :param callback: Callback that will be called at each step
        :return: as ``collect_rollouts``
        """
        callback.on_rollout_start()
        if not np.all(self._last_episode_starts):
            self._last_obs = env.reset()  # type: ignore[assignment]
            if isinstance(callback, TellsMasks):
                callback.ask()
        first = self.num_timesteps == self._num_timesteps_at_start
        all_observations: list[th.Tensor | TensorDict] = []
        all_actions, all_rewards, all_dones, played = [], [], [], []
        all_masks: list[th.Tensor] = []
        n_steps, n_done = 0, np.zeros(env.num_envs, dtype=int)
        while np.any(n_done < self.n_episodes):
            if self.num_timesteps >= self._total_timesteps:
                if first:
                    warnings.warn(
                        f"`learn` ends without an update, for which each environment needs {self.n_episodes} whole episodes. "
                        f"They have ended {n_done.tolist()}. Give more `total_timesteps`.",
                        stacklevel=6,
                    )
                return False
            playing = n_done < self.n_episodes
            # Copies, because an environment may write its next observations and rewards into the same arrays
            obs_tensor = obs_as_tensor(copy.deepcopy(self._last_obs), self.device)  # type: ignore[arg-type]
            action_masks = getattr(self.policy, "action_masks", None)
            with th.no_grad():
                sampled, values, log_probs = self.policy(obs_tensor)
            actions = sampled.cpu().numpy()
            clipped_actions = self._for_env(actions)
            new_obs, rewards, dones, infos = env.step(clipped_actions)
            self.num_timesteps += env.num_envs
            rewards, dones = rewards.copy(), dones.copy()
            # Before the callback, which may end the run: the next `learn` then knows that these episodes are cut
            self._last_obs = new_obs  # type: ignore[assignment]
            self._last_episode_starts = dones

            # Give access to local variables, which have A2C's names
            callback.update_locals(locals())
            if not callback.on_step():
                return False
            self._update_info_buffer([infos[i] for i in np.flatnonzero(playing)], dones[playing])

            all_observations.append(obs_tensor)
            all_actions.append(sampled)
            all_rewards.append(rewards)
            all_dones.append(dones)
            all_masks += [] if action_masks is None else [action_masks]
            played.append(playing)
            n_steps += 1
            n_done += dones

        taken = th.stack(all_actions)
        if isinstance(self.action_space, spaces.Box):
            # (n_steps, n_envs, action_dim) as in SB3's rollout buffer, whatever the shape of an action
            taken = taken.reshape(*taken.shape[:2], -1)
        mask = th.as_tensor(np.array(played), device=self.device)  # (n_steps, n_envs)
        returns = episode_returns(np.array(all_rewards), np.array(all_dones), self.gamma, self.return_to_go)
        self._episodes = Episodes(
            observations=_select(all_observations, mask),
            actions=taken[mask],
            returns=th.as_tensor(returns, dtype=th.float32, device=self.device)[mask],
            n_episodes=self.n_episodes * env.num_envs,
            action_masks=th.stack(all_masks)[mask] if all_masks else None,
        )
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _for_env(self, actions: np.ndarray) -> np.ndarray:
        if not isinstance(self.action_space, spaces.Box):
            return actions
        if self.policy.squash_output:
            return self.policy.unscale_action(actions)
        # The samples come from an unbounded Gaussian distribution
        return np.clip(actions, self.action_space.low, self.action_space.high)

    def train(self) -> None:
        """
        Update policy using the episodes that were played (one gradient step over whole data).
        """
        assert self._episodes is not None
        # Switch to train mode (this affects batch norm / dropout)
        self.policy.set_training_mode(True)

        # Update optimizer learning rate
        self._update_learning_rate(self.policy.optimizer)

        observations, actions, returns, n_episodes, action_masks = self._episodes
        self._episodes = None
        with nullcontext() if action_masks is None else self._maskable_policy().masked(action_masks):
            values, log_prob, entropy = self.policy.evaluate_actions(observations, actions)
        values = values.flatten()

        weights = returns - values.detach() if self.baseline else returns
        if self.normalize_returns:
            centered = weights - weights.mean()
            # Without the condition, equal returns would leave a rounding error, which the division makes as large as 1
            weights = centered / (weights.std(unbiased=False) + 1e-8) if weights.min() < weights.max() else 0 * weights

        # Sums over the steps of an episode, means over episodes
        policy_loss = -(log_prob * weights).sum() / n_episodes
        value_loss = ((returns - values) ** 2).sum() / n_episodes
        # Without an analytical form, the entropy is estimated from the actions taken
        entropy_loss = (log_prob if entropy is None else -entropy).sum() / n_episodes
        loss = policy_loss + self.ent_coef * entropy_loss
        if self.baseline:
            loss = loss + self.vf_coef * value_loss

        # Optimization step
        self.policy.optimizer.zero_grad()
        loss.backward()
        grad_norm = th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
        steps = len(returns) / n_episodes
        logged = {
            "loss": loss.item(),
            "policy_loss": policy_loss.item(),
            # Per step, as in A2C
            "entropy_loss": entropy_loss.item() / steps,
            "grad_norm": grad_norm.item(),
        }
        if self.baseline:
            logged["value_loss"] = value_loss.item() / steps
        check_finite(logged)
        self.policy.optimizer.step()

        self._n_updates += 1
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name, value in logged.items():
            self.logger.record(f"train/{name}", value)
        if self.baseline:
            explained_var = explained_variance(values.numpy(force=True), returns.numpy(force=True))
            self.logger.record("train/explained_variance", explained_var)
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", th.exp(self.policy.log_std).mean().item())

    def learn(
        self: SelfREINFORCE,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 10,
        tb_log_name: str = "REINFORCE",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        *,
        use_masking: bool = True,
    ) -> SelfREINFORCE:
        self.use_masking = use_masking
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )


def episode_returns(rewards: np.ndarray, dones: np.ndarray, gamma: float, return_to_go: bool) -> np.ndarray:
    """
    Discounted returns of episodes, ``G_t = sum_{k >= t} gamma^(k - t) r_k``, or the whole episode's ``G_0`` for each step.

    :param rewards: Rewards, shape (n_steps, n_envs)
    :param dones: Whether an episode ends with the step, shape (n_steps, n_envs)
    :param gamma: Discount factor
    :param return_to_go: Whether to leave out the rewards before the step
    :return: Returns, shape (n_steps, n_envs); for an episode that does not end, the returns of the rewards so far
    """
    returns = discounted_returns(rewards, dones, 0.0, gamma)
    if not return_to_go:
        for t in range(1, len(returns)):
            returns[t] = np.where(dones[t - 1], returns[t], returns[t - 1])
    return returns


def _select(observations: list[th.Tensor | TensorDict], mask: th.Tensor) -> th.Tensor | TensorDict:
    """
    :param observations: Observations at each step, shape (n_envs, ...), or dicts of such
    :param mask: Which observations to select, shape (n_steps, n_envs)
    :return: The selected observations, shape (n_selected, ...)
    """
    first = observations[0]
    if isinstance(first, dict):
        return {key: th.stack([obs[key] for obs in observations])[mask] for key in first}  # type: ignore[index]
    return th.stack(observations)[mask]  # type: ignore[arg-type]
