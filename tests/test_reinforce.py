"""REINFORCE: whole episodes, no bootstrap, and the gradient of the textbook."""

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback, StopTrainingOnRewardThreshold
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper

from sb3_qac import REINFORCE
from sb3_qac.reinforce.reinforce import Episodes, episode_returns
from tests.envs import ScriptedEnv
from tests.test_qa2c import update_figures


class Corridor(gym.Env):
    """An episode of some steps, each with the reward of its number; the observation is the number."""

    def __init__(self, lengths=(3,), observation_space=None, action_space=None, truncate=False):
        self.observation_space = observation_space or spaces.Box(0, 100, (1,), np.float32)
        self.action_space = action_space or spaces.Discrete(2)
        self.lengths, self.truncate, self.n_episodes = lengths, truncate, 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.length = self.lengths[self.n_episodes % len(self.lengths)]
        self.n_episodes += 1
        self.step_number = 0
        return self._observation(), {}

    def step(self, action):
        self.step_number += 1
        end = self.step_number == self.length
        return self._observation(), float(self.step_number), end and not self.truncate, end and self.truncate, {}

    def _observation(self):
        number = np.full((1,), self.step_number, dtype=np.float32)
        if isinstance(self.observation_space, spaces.Dict):
            return {"number": number}
        if self.observation_space.shape != (1,):
            return np.full(self.observation_space.shape, self.step_number, dtype=self.observation_space.dtype)
        return number


# Names of A2C's local variables for a step
OF_A_STEP = (
    "actions",
    "clipped_actions",
    "dones",
    "infos",
    "log_probs",
    "n_steps",
    "new_obs",
    "obs_tensor",
    "rewards",
    "values",
)


def collect(model):
    _, callback = model._setup_learn(10**6, None)
    callback.on_training_start({}, {})
    assert model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return model._episodes


class ActionRecorder(VecEnvWrapper):
    """Keeps the actions that the environments are sent."""

    def __init__(self, venv):
        super().__init__(venv)
        self.sent = []

    def reset(self):
        return self.venv.reset()

    def step_async(self, actions):
        self.sent.append(actions.copy())
        self.venv.step_async(actions)

    def step_wait(self):
        return self.venv.step_wait()


def test_callbacks_see_the_actions_of_the_step():
    """As with A2C and PPO: an array, one action for each environment."""
    env, seen = ActionRecorder(DummyVecEnv([lambda: Corridor((3,))] * 2)), []
    REINFORCE("MlpPolicy", env, n_episodes=2, seed=0).learn(12, lambda local, _: seen.append(local["actions"]) is None)
    assert len(seen) == 6
    np.testing.assert_array_equal(seen, env.sent)


class SquashedPolicy(ActorCriticPolicy):
    """A Gaussian policy within the bounds of the actions, whose entropy has no analytical form."""

    def _build(self, lr_schedule):
        self._squash_output = True
        self.action_dist = SquashedDiagGaussianDistribution(self.action_space.shape[0])
        super()._build(lr_schedule)


@pytest.mark.parametrize("policy", ["MlpPolicy", SquashedPolicy])
def test_the_environment_gets_actions_within_its_bounds_and_the_update_those_of_the_policy(policy):
    low, high = np.float32(-0.5), np.float32(0.7)
    env = ActionRecorder(DummyVecEnv([lambda: Corridor((20,), action_space=spaces.Box(low, high, (2,)))]))
    model = REINFORCE(policy, env, seed=0, device="cpu", ent_coef=0.1)
    observations, actions, *_ = collect(model)
    drawn, sent = actions.numpy(), np.concatenate(env.sent)
    if policy is SquashedPolicy:
        # From -1 to 1 to the bounds
        expected = low + (drawn + 1) / 2 * (high - low)
        _, log_prob, entropy = model.policy.evaluate_actions(observations, actions)
        assert entropy is None
        model.train()
        assert model.logger.name_to_value["train/entropy_loss"] == pytest.approx(log_prob.mean().item(), rel=1e-5)
    else:
        expected = drawn.clip(low, high)
        assert (drawn < low).any() and (drawn > high).any()
    np.testing.assert_allclose(sent, expected, rtol=1e-6)


def test_returns_are_those_of_the_textbook():
    # Rewards 1, 2, 4 with discount 1/2, then an episode of one step with 8
    rewards, dones = np.array([[1.0], [2.0], [4.0], [8.0]]), np.array([[False], [False], [True], [True]])
    assert episode_returns(rewards, dones, 0.5, True).ravel().tolist() == [3.0, 4.0, 4.0, 8.0]
    assert episode_returns(rewards, dones, 0.5, False).ravel().tolist() == [3.0, 3.0, 3.0, 8.0]


@pytest.mark.parametrize("truncate", [False, True])
def test_each_environment_gives_as_many_whole_episodes(truncate):
    env = make_vec_env(lambda: Corridor((2, 5, 3), truncate=truncate), 3)
    model = REINFORCE("MlpPolicy", env, n_episodes=2, gamma=1.0, device="cpu")
    episodes = collect(model)
    assert episodes.n_episodes == 6
    # Episodes of 2 and 5 steps in each of three environments. A time limit ends an episode as any other end does
    expected = [3.0, 2.0, 15.0, 14.0, 12.0, 9.0, 5.0]
    assert sorted(episodes.returns.tolist()) == sorted(3 * expected)
    assert sorted(episodes.observations.flatten().tolist()) == sorted(3 * [0.0, 1.0, 0.0, 1.0, 2.0, 3.0, 4.0])


def test_without_return_to_go_every_step_has_the_return_of_its_episode():
    env = make_vec_env(lambda: Corridor((2, 3)), 1)
    model = REINFORCE("MlpPolicy", env, n_episodes=2, gamma=1.0, return_to_go=False, device="cpu")
    assert collect(model).returns.tolist() == [3.0, 3.0, 6.0, 6.0, 6.0]


def test_long_episodes_are_not_crowded_out_by_short_ones():
    lengths = iter([(2,), (10,)])
    env = make_vec_env(lambda: Corridor(next(lengths)), 2)
    model = REINFORCE("MlpPolicy", env, gamma=1.0, device="cpu")
    for _ in range(2):
        episodes = collect(model)
        # While the second environment plays its 10 steps, the first one has ended five times: only once does it count
        assert len(episodes.returns) == 12 and episodes.n_episodes == 2
        # and the next rollout starts with new episodes in both
        assert (episodes.observations == 0).sum() == 2


def test_logged_episodes_are_those_of_the_update_and_all_steps_count():
    lengths = iter([(2,), (10,)])
    env = make_vec_env(lambda: Corridor(next(lengths)), 2)
    model = REINFORCE("MlpPolicy", env, n_episodes=2, gamma=1.0, device="cpu")
    episodes = collect(model)
    # While the second environment plays twice 10 steps, the first one ends ten episodes of 2 steps
    assert [info["l"] for info in model.ep_info_buffer] == [2, 2, 10, 10]
    first_returns = [1 + 2, 1 + 2, sum(range(1, 11)), sum(range(1, 11))]
    assert [info["r"] for info in model.ep_info_buffer] == first_returns
    assert len(episodes.returns) == sum(info["l"] for info in model.ep_info_buffer) == 24
    assert model.num_timesteps == 2 * 20


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("baseline", [False, True])
def test_the_gradient_and_the_log_are_those_of_the_formula(baseline, normalize):
    model = REINFORCE(
        "MlpPolicy",
        make_vec_env(lambda: Corridor((3, 5)), 2),
        n_episodes=2,
        baseline=baseline,
        normalize_returns=normalize,
        ent_coef=0.01,
        vf_coef=0.3,
        max_grad_norm=None,
        seed=0,
        device="cpu",
    )
    observations, actions, returns, n_episodes, _ = collect(model)
    # The sums over the steps of the four episodes, one by one
    values = model.policy.predict_values(observations).detach().flatten()
    weights = returns - values if baseline else returns
    if normalize:
        weights = (weights - weights.mean()) / ((weights - weights.mean()) ** 2).mean().sqrt()
    policy_loss, entropy_loss, value_loss = th.zeros(()), th.zeros(()), th.zeros(())
    for obs, action, g, weight in zip(observations, actions, returns, weights, strict=True):
        distribution = model.policy.get_distribution(obs[None])
        policy_loss = policy_loss - distribution.log_prob(action[None])[0] * weight
        entropy_loss = entropy_loss - distribution.entropy()[0]
        value_loss = value_loss + (g - model.policy.predict_values(obs[None])[0, 0]) ** 2
    loss = (policy_loss + 0.01 * entropy_loss + (0.3 * value_loss if baseline else 0)) / n_episodes
    parameters = list(model.policy.parameters())
    expected = th.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    model.train()
    for parameter, gradient in zip(parameters, expected, strict=True):
        found = th.zeros_like(parameter) if parameter.grad is None else parameter.grad
        th.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)

    expected_log = {
        "loss": loss.item(),
        "policy_loss": policy_loss.item() / n_episodes,
        # Means over the steps
        "entropy_loss": entropy_loss.item() / len(returns),
        "grad_norm": th.cat([gradient.flatten() for gradient in expected]).norm().item(),
        "n_updates": 1,
        "learning_rate": model.learning_rate,
    }
    if baseline:
        expected_log["value_loss"] = value_loss.item() / len(returns)
        expected_log["explained_variance"] = 1 - ((returns - values).var() / returns.var()).item()
    assert update_figures(model.logger.name_to_value) == pytest.approx(expected_log, rel=1e-4, abs=1e-6)


def test_without_a_baseline_the_value_head_is_left_alone():
    model = REINFORCE("MlpPolicy", make_vec_env(Corridor, 2), seed=0, device="cpu")
    before = model.policy.value_net.weight.clone()
    model.learn(100)
    assert th.equal(before, model.policy.value_net.weight)
    model = REINFORCE("MlpPolicy", make_vec_env(Corridor, 2), baseline=True, seed=0, device="cpu").learn(100)
    assert not th.equal(before, model.policy.value_net.weight)


def test_normalized_weights_do_not_depend_on_a_constant_in_the_returns():
    parameters = []
    for constant in (0.0, 5.0):
        model = REINFORCE("MlpPolicy", make_vec_env(Corridor, 2), normalize_returns=True, seed=0, device="cpu")
        model._setup_learn(1)
        actions = th.tensor(6 * [0, 0, 1])[:12]
        model._episodes = Episodes(th.ones(12, 1), actions, th.linspace(0, 1, 12) + constant, n_episodes=2)
        model.train()
        parameters.append(model.policy.action_net.weight)
    th.testing.assert_close(*parameters, rtol=1e-4, atol=1e-6)


def test_equal_returns_that_are_normalized_change_nothing():
    """Their mean is rounded, in float32. Divided by a standard deviation as small, the rounding error would be about 1."""
    model = REINFORCE("MlpPolicy", make_vec_env(Corridor, 2), normalize_returns=True, seed=0, device="cpu")
    model._setup_learn(1)
    before = model.policy.action_net.weight.clone()
    returns = th.full((12,), -0.1)
    assert returns.mean() != returns[0]
    model._episodes = Episodes(th.ones(12, 1), th.zeros(12, dtype=th.long), returns, n_episodes=2)
    model.train()
    assert th.equal(before, model.policy.action_net.weight)


@pytest.mark.parametrize(
    ("policy", "observation_space", "action_space"),
    [
        ("MlpPolicy", None, spaces.Box(-1, 1, (2,))),
        ("MlpPolicy", None, spaces.MultiDiscrete([2, 3])),
        ("MultiInputPolicy", spaces.Dict({"number": spaces.Box(0, 100, (1,), np.float32)}), None),
        ("CnnPolicy", spaces.Box(0, 255, (1, 36, 36), np.uint8), None),
    ],
)
def test_other_spaces(policy, observation_space, action_space, tmp_path):
    env = make_vec_env(lambda: Corridor((3, 4), observation_space, action_space), 2)
    model = REINFORCE(policy, env, baseline=True, seed=0, device="cpu").learn(60)
    assert model.num_timesteps >= 60 and model._n_updates > 0
    model.save(tmp_path / "model.zip")
    obs = env.reset()
    actions = [m.predict(obs, deterministic=True)[0] for m in (model, REINFORCE.load(tmp_path / "model.zip"))]
    np.testing.assert_array_equal(*actions)


@pytest.mark.parametrize("shape", [(), (2,), (1, 1), (1, 2), (2, 2)])
def test_continuous_actions_of_any_shape_have_one_log_probability(shape):
    model = REINFORCE(
        "MlpPolicy", make_vec_env(lambda: Corridor(action_space=spaces.Box(-1, 1, shape)), 2), seed=0, device="cpu"
    )
    observations, actions, *_ = collect(model)
    n_actions = int(np.prod(shape))
    assert actions.shape == (len(observations), n_actions)

    _, log_prob, _ = model.policy.evaluate_actions(observations, actions)
    # The standard deviation is 1 at the start
    distances = actions - model.policy.get_distribution(observations).distribution.mean
    expected = -(distances.square().sum(dim=1) + n_actions * np.log(2 * np.pi)) / 2
    th.testing.assert_close(log_prob, expected)
    model.learn(100)


@pytest.mark.parametrize(
    ("action_space", "start"),
    [(spaces.Discrete(2, start=1), "1"), (spaces.MultiDiscrete([2, 3], start=[1, 0]), r"\[1, 0\]")],
)
def test_actions_that_do_not_count_from_0_are_refused_with_the_cure(action_space, start):
    """SB3's policies would send actions from 0, which are others."""
    with pytest.raises(ValueError, match=rf"starts at {start},.*TransformAction.*action \+ {start}`"):
        REINFORCE("MlpPolicy", Corridor(action_space=action_space))


def test_episodes_that_do_not_end_do_not_hang():
    model = REINFORCE("MlpPolicy", make_vec_env(lambda: Corridor((10**9,)), 1), device="cpu")
    with pytest.warns(UserWarning, match="without an update") as warned:
        assert model.learn(50).num_timesteps == 50
    # It points to the call of `learn`
    assert warned[0].filename == __file__


def test_a_call_of_learn_that_makes_no_update_says_what_it_had_and_what_it_needed():
    """Of two environments, one ends an episode every 3 steps and the other every 8; an update needs 4 episodes."""
    env = DummyVecEnv([Corridor, lambda: Corridor((8,))])
    model = REINFORCE("MlpPolicy", env, n_episodes=2, device="cpu")
    with pytest.warns(UserWarning, match=r"without an update.* needs 2 whole episodes.* ended \[4, 1\]"):
        model.learn(28)
    # The second update ends too early, but the first was made
    model.learn(40)
    assert model._n_updates == 1
    with pytest.warns(UserWarning, match=r"without an update.* ended \[0, 0\]"):
        model.learn(4, reset_num_timesteps=False)
    # Nothing is left to do
    model.learn(0, reset_num_timesteps=False)


@pytest.mark.parametrize(
    "argument",
    [
        {"n_episodes": 0},
        {"n_episodes": 1.5},
        {"gamma": 1.1},
        {"ent_coef": -1.0},
        {"max_grad_norm": -1.0},
        {"baseline": "no"},
        {"return_to_go": None},
        {"normalize_returns": "True"},
    ],
)
def test_what_cannot_be_used_is_refused(argument):
    (name,) = argument
    with pytest.raises(ValueError, match=f"`{name}`"):
        REINFORCE("MlpPolicy", "CartPole-v1", **argument)


def test_non_finite_returns_keep_the_last_good_update():
    env = DummyVecEnv([lambda: ScriptedEnv([1.0] * 8 + [np.nan] * 8, terminations=(3, 7, 11, 15))])
    model = REINFORCE("MlpPolicy", env, n_episodes=2, seed=0, device="cpu").learn(8)
    before = model.policy.action_net.weight.clone()
    with pytest.raises(ValueError, match=r"loss is nan.*VecCheckNan"):
        model.learn(8, reset_num_timesteps=False)
    assert th.equal(before, model.policy.action_net.weight)


def test_a_model_saved_at_the_end_of_a_rollout_has_no_episodes(tmp_path):
    class Save(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            assert self.model._episodes is not None
            self.model.save(tmp_path / "model")

    REINFORCE("MlpPolicy", Corridor(), device="cpu").learn(3, Save())
    assert REINFORCE.load(tmp_path / "model")._episodes is None


def test_rl_zoo_trains_it_with_its_preset(tmp_path, rl_zoo):
    printed = rl_zoo("train", "--algo", "reinforce", "--env", "CartPole-v1", "-n", 2000, "--eval-freq", -1, cwd=tmp_path)
    assert "'normalize_returns', True" in printed
    assert (tmp_path / "logs/reinforce/CartPole-v1_1/CartPole-v1.zip").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_cartpole_is_solved(seed):
    """As the course document has it, a training stops at 500: the return of 200 greedy episodes, every 10,000 steps."""
    kwargs = dict(normalize_returns=True, policy_kwargs=dict(net_arch=[128, 128]))
    model = REINFORCE("MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), seed=seed, device="cpu", **kwargs)
    evaluation = EvalCallback(
        make_vec_env("CartPole-v1", 200, seed=10_000 + seed),
        callback_on_new_best=StopTrainingOnRewardThreshold(500),
        eval_freq=10_000 // 8,
        n_eval_episodes=200,
        verbose=0,
    )
    model.learn(300_000, evaluation)
    assert evaluation.best_mean_reward == 500 and model.num_timesteps < 300_000
    # and the agent that it stopped with solves others, by gymnasium's threshold
    env = make_vec_env("CartPole-v1", 8, seed=1000)
    assert evaluate_policy(model, env, 100)[0] >= gym.spec("CartPole-v1").reward_threshold


class OneArray(VecEnvWrapper):
    """Writes the observations and rewards of all steps into the same arrays, as environments of other packages may."""

    def reset(self):
        self.obs, self.rewards = self.venv.reset(), np.zeros(self.num_envs, dtype=np.float32)
        return self.obs

    def step_wait(self):
        obs, rewards, dones, infos = self.venv.step_wait()
        self.obs[:], self.rewards[:] = obs, rewards
        return self.obs, self.rewards, dones, infos


def test_observations_and_rewards_may_be_written_into_the_same_arrays():
    model = REINFORCE("MlpPolicy", OneArray(DummyVecEnv([Corridor])), gamma=1.0, n_episodes=1, device="cpu")
    episodes = collect(model)
    assert episodes.observations.ravel().tolist() == [0, 1, 2] and episodes.returns.tolist() == [6, 5, 3]


def test_callbacks_see_the_local_variables_of_a_step_of_a2c():
    names = {}
    for algorithm in (A2C, REINFORCE):

        def see(local, _, algorithm=algorithm):
            names.setdefault(algorithm, {name: np.shape(local[name]) for name in OF_A_STEP})

        algorithm("MlpPolicy", make_vec_env("CartPole-v1", 2), device="cpu").learn(64, see)
    assert names[A2C] == names[REINFORCE]


def test_a_callback_that_stops_in_an_episode_does_not_cut_the_next_one():
    class StopAt(BaseCallback):
        def _on_step(self):
            return self.num_timesteps < 4

    # The first step of the second episode is the last one of the first call
    model = REINFORCE("MlpPolicy", DummyVecEnv([Corridor]), gamma=1.0, n_episodes=1, device="cpu")
    model.learn(10, StopAt())
    assert model.num_timesteps == 4
    episodes = collect(model)
    assert episodes.observations.ravel().tolist() == [0, 1, 2] and episodes.returns.tolist() == [6, 5, 3]
