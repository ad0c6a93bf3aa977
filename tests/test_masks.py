"""Action masks by sb3-contrib's convention; its tests of MaskablePPO are among these, adapted."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib.common.envs import InvalidActionEnvDiscrete, InvalidActionEnvMultiBinary, InvalidActionEnvMultiDiscrete
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_with_masks
from sb3_contrib.common.maskable.utils import get_action_masks
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.distributions import make_proba_distribution
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv, IdentityEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

from sb3_qac import PQN, QA2C, QPPO, REINFORCE
from sb3_qac.common.actions import JointActions, JointDistribution
from sb3_qac.common.losses import all_action_policy_loss, negative_entropy
from sb3_qac.common.masks import check_masks, mask_distribution, with_masks
from sb3_qac.diagnose import diagnose_model
from sb3_qac.qa2c.policies import ActorCriticQPolicy
from sb3_qac.resume import ExactCheckpointCallback
from tests.test_resume import straight_and_resumed

ALGORITHMS = [QA2C, QPPO, PQN, REINFORCE]
DISCRETE = (InvalidActionEnvDiscrete, dict(dim=20, n_invalid_actions=15))
MULTI_DISCRETE = (InvalidActionEnvMultiDiscrete, dict(dims=[3, 1, 2], n_invalid_actions=2))
MULTI_BINARY = (InvalidActionEnvMultiBinary, dict(dims=3, n_invalid_actions=2))


def env_of(toy=DISCRETE, n_envs=4, ep_length=20, **kwargs):
    env_class, env_kwargs = toy
    return make_vec_env(env_class, n_envs, seed=0, env_kwargs=dict(ep_length=ep_length, **env_kwargs), **kwargs)


def model_of(algorithm, env, policy="MlpPolicy", **kwargs):
    settings = dict(seed=0, device="cpu", gamma=0.5, learning_rate=3e-3)
    settings |= {QA2C: dict(n_steps=5), QPPO: dict(n_steps=16), PQN: dict(n_steps=16), REINFORCE: {}}[algorithm]
    settings["policy_kwargs"] = dict(net_arch=[32], optimizer_class=th.optim.Adam)
    return algorithm(policy, env, **settings | kwargs)


@pytest.mark.parametrize(
    ("algorithm", "toy"),
    [
        (QA2C, DISCRETE),
        (PQN, MULTI_BINARY),
        *(
            pytest.param(algorithm, toy, marks=pytest.mark.slow)
            for algorithm, toy in (
                (QPPO, DISCRETE),
                (QPPO, MULTI_DISCRETE),
                (QPPO, MULTI_BINARY),
                (QA2C, MULTI_DISCRETE),
                (QA2C, MULTI_BINARY),
                (PQN, DISCRETE),
                (PQN, MULTI_DISCRETE),
                (REINFORCE, DISCRETE),
                (REINFORCE, MULTI_BINARY),
                (REINFORCE, MULTI_DISCRETE),
            )
        ),
    ],
)
def test_the_toy_environments_of_sb3_contrib_are_learned(algorithm, toy):
    """A step is worth 1 if the action is the observation, which no mask forbids: 20 steps."""
    env = env_of(toy, n_envs=8)
    model = model_of(algorithm, env).learn(4_000)
    assert evaluate_with_masks(model, env, 40)[0] > 14


def test_logged_state_value_of_pqn_is_that_of_allowed_actions():
    model = model_of(PQN, env_of(), n_epochs=1, batch_size=64, learning_rate=0.0)
    with th.no_grad():
        model.policy.q_net.weight.zero_()
        model.policy.q_net.bias.copy_(th.arange(20))
    model.learn(64)
    best = (model.rollout_buffer.action_masks.numpy() * np.arange(20)).max(axis=-1)
    assert best.min() < 19
    assert model.logger.name_to_value["train/state_value"] == pytest.approx(best.mean())


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_actions_are_not_learned_without_their_masks(algorithm):
    """sb3-contrib's test: 70 actions, of which 55 are forbidden in each state."""
    returns = []
    for use_masking in (True, False):
        env = env_of((InvalidActionEnvDiscrete, dict(dim=70, n_invalid_actions=55)), n_envs=8)
        model = model_of(algorithm, env).learn(6_000, use_masking=use_masking)
        returns.append((evaluate_with_masks if use_masking else evaluate_policy)(model, env, 40)[0])
    assert returns[0] > 2 * returns[1]


class TellsMasks(BaseCallback):
    """Asserts in each step of a rollout that the action was allowed by what the environment said before it."""

    def _on_rollout_start(self):
        self.masks = get_action_masks(self.training_env)

    def _on_step(self):
        for mask, action in zip(self.masks, self.locals["actions"], strict=True):
            starts = np.cumsum((0, *np.atleast_1d(getattr(self.model.action_space, "nvec", 0))[:-1]))
            if isinstance(self.model.action_space, spaces.MultiBinary):
                starts = 2 * np.arange(len(action))
            assert np.asarray(mask)[starts + action.astype(int)].all()
        self.masks = get_action_masks(self.training_env)
        return True


@pytest.mark.parametrize("toy", [DISCRETE, MULTI_DISCRETE, MULTI_BINARY], ids=lambda toy: toy[0].__name__)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_forbidden_actions_are_never_taken_in_rollouts_and_by_predict(algorithm, toy):
    env = env_of(toy)
    model = model_of(algorithm, env).learn(160, TellsMasks())
    obs = env.reset()
    if toy is DISCRETE:
        masks = get_action_masks(env)
        for deterministic in (True, False):
            actions = [model.predict(obs, deterministic=deterministic, action_masks=masks)[0] for _ in range(20)]
            assert all(mask[action] for row in actions for mask, action in zip(masks, row, strict=True))
        # One observation, and the mask of one action
        only = np.arange(20) == 7
        assert model.predict(obs[0], action_masks=only)[0] == 7
        assert model.predict(obs[0], action_masks=only.tolist())[0] == 7


def closed_form(distribution, taken, q_values, returns, pg_coef, ent_coef, baseline, beta, shrinkage, sampled):
    """
    Gradient of the actor's loss with respect to the logits, written anew with NumPy.

    ``d log pi(a) / d logit_ij = [a_i = j] - pi_i(j)`` for allowed j, and 0 for others, whose actions are in no sum.

    :param distribution: for each component the probabilities of its values, 0 for those that are not allowed
    """
    sizes = [len(probs) for probs in distribution]
    actions = np.stack(np.unravel_index(np.arange(np.prod(sizes)), sizes), axis=1)
    probs = np.prod([p[actions[:, i]] for i, p in enumerate(distribution)], axis=0)
    score = np.concatenate(
        [(actions[:, [i]] == np.arange(size)) - p for i, (size, p) in enumerate(zip(sizes, distribution, strict=True))], axis=1
    )
    value = probs @ q_values
    shrunk = value + (q_values - value) * (probs / (probs + shrinkage) if shrinkage else 1)
    weights = shrunk - value * baseline
    if sampled:
        gradient = -weights[taken] * score[taken]
    else:
        gradient = -(probs * weights) @ score - beta * (returns - shrunk[taken]) * score[taken]
    log_probs = np.log(np.where(probs > 0, probs, 1))
    entropy_gradient = (probs * log_probs) @ score
    gradient = pg_coef * gradient + ent_coef * entropy_gradient
    return np.where(np.concatenate(distribution) > 0, gradient, 0)


ESTIMATORS = [
    dict(baseline=False, beta=0.0, shrinkage=0.0, policy_gradient="all-action"),
    dict(baseline=True, beta=0.0, shrinkage=0.0, policy_gradient="all-action"),
    dict(baseline=False, beta=0.5, shrinkage=0.1, policy_gradient="all-action"),
    dict(baseline=True, beta=1.0, shrinkage=0.0, policy_gradient="all-action"),
    dict(baseline=False, beta=0.0, shrinkage=0.0, policy_gradient="sampled"),
    dict(baseline=True, beta=0.0, shrinkage=0.0, policy_gradient="sampled"),
]


@pytest.mark.parametrize(
    "toy", [(InvalidActionEnvDiscrete, dict(dim=5, n_invalid_actions=2)), MULTI_DISCRETE], ids=["Discrete", "MultiDiscrete"]
)
# QPPO's sum always has the baseline, and its sampled form has another weight
@pytest.mark.parametrize(
    ("algorithm", "estimator"),
    [*((QA2C, each) for each in ESTIMATORS), *((QPPO, each) for each in ESTIMATORS[:4] if each["baseline"])],
    ids=str,
)
def test_gradients_with_masks_are_the_closed_form(algorithm, estimator, toy):
    """The weights of the actor are one layer: with SGD and a rate of 1, an update is its gradient."""
    settings = dict(ent_coef=0.3, max_grad_norm=None, n_steps=8, learning_rate=1.0)
    if algorithm is QA2C:
        settings |= estimator | dict(pg_coef=0.7)
    else:
        settings |= dict(
            n_epochs=1, batch_size=32, normalize_advantage=False, beta=estimator["beta"], shrinkage=estimator["shrinkage"]
        )
    policy_kwargs = dict(net_arch=[], optimizer_class=th.optim.SGD, ortho_init=False)
    model = model_of(algorithm, env_of(toy), policy_kwargs=policy_kwargs, **settings)
    policy = model.policy.double()
    # SB3 makes floats of observations
    policy.extract_features = lambda obs, *_: type(policy).extract_features(policy, obs, *_).double()
    model.learn(8 * 4, TrainsLater())
    before = {name: parameter.detach().clone() for name, parameter in policy.action_net.named_parameters()}
    (data,) = model.rollout_buffer.get(batch_size=None)
    with th.no_grad(), policy.masked(data.action_masks):
        q_values, log_probs = policy.evaluate_all_actions(data.observations)
    features = policy.extract_features(data.observations).numpy()
    logits = features @ before["weight"].numpy().T + before["bias"].numpy()
    sizes = [5] if toy is not MULTI_DISCRETE else [3, 1, 2]
    masks, ends = data.action_masks.numpy(), np.cumsum(sizes)[:-1]
    assert 0 < masks.mean() < 1
    exps = np.where(masks, np.exp(logits), 0)
    numbers = policy.joint_actions.numbers(data.actions).squeeze(1).numpy()
    expected = np.zeros_like(logits)
    for t in range(len(logits)):
        distribution = [part / part.sum() for part in np.split(exps[t], ends)]
        expected[t] = closed_form(
            distribution,
            numbers[t],
            q_values[t].numpy(),
            data.returns[t].item(),
            getattr(model, "pg_coef", 1.0),
            0.3,
            estimator["baseline"],
            estimator["beta"],
            estimator["shrinkage"],
            estimator["policy_gradient"] == "sampled",
        )
        joint = np.prod(np.meshgrid(*distribution, indexing="ij"), axis=0).ravel()
        np.testing.assert_allclose(log_probs[t].exp().numpy(), joint, atol=1e-12)
        # Exactly 0 where a component is not allowed
        assert (log_probs[t].exp().numpy()[joint == 0] == 0).all()
    model.train()
    gradient = {name: before[name] - parameter.detach() for name, parameter in policy.action_net.named_parameters()}
    np.testing.assert_allclose(gradient["bias"].numpy(), expected.mean(axis=0), atol=1e-7)
    np.testing.assert_allclose(gradient["weight"].numpy(), expected.T @ features / len(features), atol=1e-7)


class TrainsLater(BaseCallback):
    """Ends ``learn`` after the rollout, before the update."""

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        self.model.train, self.train = lambda: None, self.model.train

    def _on_training_end(self):
        del self.model.train


@pytest.mark.parametrize("algorithm", [QA2C, QPPO, REINFORCE])
def test_a_state_that_allows_one_action_gives_no_gradient_to_the_actor(algorithm):
    env = env_of((InvalidActionEnvDiscrete, dict(dim=4, n_invalid_actions=3)))
    model = model_of(algorithm, env, ent_coef=0.1, policy_kwargs=dict(net_arch=dict(pi=[8], vf=[8])))
    before = {name: parameter.detach().clone() for name, parameter in model.policy.named_parameters()}
    model.learn(160)
    for name, parameter in model.policy.named_parameters():
        if "policy_net" in name or "action_net" in name:
            assert (parameter == before[name]).all()
    if algorithm is not REINFORCE:
        assert any(
            (parameter != before[name]).any() for name, parameter in model.policy.q_net.named_parameters(prefix="q_net")
        )
        assert model.logger.name_to_value["train/action_gap"] == 0
        # At most of the size of a rounding error
        assert abs(model.logger.name_to_value["train/abs_advantage"]) < 1e-6
        assert model.logger.name_to_value["train/entropy_loss"] == 0


def test_a_maximum_of_pqn_leaves_out_what_is_forbidden():
    env = env_of((InvalidActionEnvDiscrete, dict(dim=6, n_invalid_actions=4)))
    model = model_of(PQN, env, gae_lambda=0.0, n_steps=3).learn(12, TrainsLater())
    buffer = model.rollout_buffer
    q_values = [model.policy.predict_q_values(th.as_tensor(obs)).detach().numpy() for obs in buffer.observations]
    last = model.policy.predict_q_values(model.policy.obs_to_tensor(model._last_obs)[0]).detach().numpy()
    masks = np.array([get_action_masks(env)])
    best_last = np.where(masks[0], last, -np.inf).max(axis=1)
    np.testing.assert_allclose(buffer.returns[-1], buffer.rewards[-1] + 0.5 * best_last, rtol=1e-5)
    assert (buffer.values <= np.max(q_values, axis=2) + 1e-6).all() and (buffer.values < np.max(q_values, axis=2) - 1e-6).any()


class Corridor(gym.Env):
    """Left is forbidden at the left end, and right at the right one; the reward is the place. Each episode has 6 steps."""

    observation_space = spaces.Box(0, 4, (1,))
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, truncates=True, n_actions=2, render_mode=None):
        self.truncates, self.action_space = truncates, spaces.Discrete(n_actions)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.n = int(self.np_random.integers(5)), 0
        return self.observe(), {}

    def observe(self):
        return np.array([self.place], np.float32)

    def action_masks(self):
        return [self.place > 0, self.place < 4, *[False] * (self.action_space.n - 2)]

    def step(self, action):
        assert self.action_masks()[action], "This action is forbidden"
        self.place += 2 * int(action) - 1
        self.n += 1
        ended = self.n >= 6
        return self.observe(), float(self.place), ended and not self.truncates, ended and self.truncates, {}


gym.register("MaskedCorridor-v0", Corridor)


class KeepsMasks(BaseCallback):
    def _on_training_start(self):
        self.masks = [get_action_masks(self.training_env)]

    def _on_step(self):
        self.masks.append(get_action_masks(self.training_env))
        return True


@pytest.mark.parametrize("algorithm", [QA2C, QPPO, PQN])
def test_the_value_of_a_state_that_a_time_limit_cuts_has_the_mask_of_the_step_before(algorithm):
    """The environment has been reset when SB3 asks for that value. Both environments are cut after six steps."""
    env = make_vec_env(lambda: Corridor(n_actions=4), 2, seed=0)
    model, asked, masks = model_of(algorithm, env, learning_rate=0.0), [], KeepsMasks()
    predict_values = model.policy.predict_values

    def spy(obs):
        asked.append((obs, predict_values(obs)))
        return asked[-1][1]

    model.policy.predict_values = spy
    model.learn(14, masks)
    first_two = [(obs, value.item()) for obs, value in asked if len(obs) == 1][:2]
    for i, (obs, value) in enumerate(first_two):
        allowed = th.as_tensor(masks.masks[5][i])
        q_values = model.policy.predict_q_values(obs)[0, allowed]
        if algorithm is PQN:
            expected = q_values.max()
        else:
            probs = model.policy.evaluate_all_actions(obs)[1].exp()[0, allowed]
            expected = (probs * q_values).sum() / probs.sum()
        assert value == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sb3s_evaluations_use_the_masks_within_learn(algorithm, tmp_path):
    """The environment refuses what its mask forbids."""
    env, eval_env = make_vec_env(Corridor, 2, seed=0), make_vec_env(Corridor, 2, seed=1)
    callbacks = [
        EvalCallback(
            eval_env, eval_freq=20, n_eval_episodes=4, deterministic=False, verbose=0, best_model_save_path=str(tmp_path)
        ),
        MaskableEvalCallback(make_vec_env(Corridor, 1), eval_freq=20, n_eval_episodes=2, verbose=0, warn=False),
    ]
    model = model_of(algorithm, env)
    for _ in range(2):
        model.learn(80, callbacks, use_masking=True)
    loaded = algorithm.load(tmp_path / "best_model.zip", device="cpu")
    evaluate_with_masks(loaded, env, 4)
    evaluate_policy(with_masks(loaded, eval_env), eval_env, 4)
    single = Corridor()
    evaluate_policy(with_masks(loaded, single), single, 2, warn=False)
    with pytest.raises(AssertionError, match="forbidden"):
        evaluate_policy(loaded, eval_env, 50, deterministic=False)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_masks_can_be_switched_off_and_need_no_environment_that_has_them(algorithm):
    env = make_vec_env(Corridor, 2, seed=0)
    with pytest.raises(AssertionError, match="forbidden"):
        model_of(algorithm, env).learn(400, use_masking=False)
    model = model_of(algorithm, make_vec_env(IdentityEnv, 2, env_kwargs=dict(dim=3, ep_length=10))).learn(60)
    # The same agent may get masks later
    model.set_env(env_of((InvalidActionEnvDiscrete, dict(dim=3, n_invalid_actions=2)), n_envs=2), force_reset=True)
    model.learn(60, TellsMasks())


@pytest.mark.parametrize(
    ("make_env", "policy", "kwargs"),
    [
        (lambda: ActionMasker(IdentityEnv(3, ep_length=10), lambda env: [True, False, True]), "MlpPolicy", {}),
        (
            lambda: ActionMasker(FakeImageEnv(3, screen_height=40, screen_width=40), lambda env: np.arange(3) != 1),
            "CnnPolicy",
            dict(policy_kwargs=dict(features_extractor_kwargs=dict(features_dim=8))),
        ),
        (lambda: ActionMasker(DictObservations(), lambda env: np.arange(3) != 1), "MultiInputPolicy", {}),
    ],
    ids=["vectors", "images", "dictionaries"],
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sb3_contribs_wrapper_works_with_every_policy(algorithm, make_env, policy, kwargs):
    env = make_vec_env(make_env, 2)
    model = model_of(algorithm, env, policy, **kwargs)
    actions = TakenActions()
    model.learn(40, actions)
    assert actions.taken == {0, 2}
    assert evaluate_with_masks(model, env, 2)


class DictObservations(gym.Env):
    observation_space = spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Discrete(4)})
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.n += 1
        return self.observation_space.sample(), float(action), self.n >= 5, False, {}


class TakenActions(BaseCallback):
    def _on_training_start(self):
        self.taken = set()

    def _on_step(self):
        self.taken |= set(np.asarray(self.locals["actions"]).ravel().tolist())
        return True


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_environments_in_processes_and_normalized_ones_have_masks(algorithm):
    env = VecNormalize(make_vec_env(Corridor, 2, seed=0, vec_env_cls=SubprocVecEnv))
    try:
        model = model_of(algorithm, env).learn(80)
        evaluate_with_masks(model, env, 2)
    finally:
        env.close()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_with_masks_is_resumed_exactly(algorithm, tmp_path):
    straight_and_resumed(
        tmp_path,
        make=lambda: model_of(algorithm, make_vec_env("MaskedCorridor-v0", 2, seed=0)),
        callbacks=lambda: [EvalCallback(make_vec_env("MaskedCorridor-v0", 1), eval_freq=30, n_eval_episodes=1, verbose=0)],
    )


@pytest.mark.parametrize("algorithm", [QA2C, QPPO, PQN])
def test_estimators_and_branches_are_diagnosed_with_masks(algorithm):
    """The environment refuses what its mask forbids, also when every action is played on purpose."""
    env = make_vec_env(lambda: Corridor(n_actions=3), 4, seed=0)
    result = diagnose_model(model_of(algorithm, env).learn(80), n_rollouts=4, n_states=8, n_repeats=2)
    assert result["branches"]["states"] == 8
    if algorithm is not PQN:
        # Only rounding separates the two forms of the sum
        assert result["estimators"]["all-action, baseline"]["difference"] < 1e-4


@pytest.mark.parametrize(
    ("masks", "space", "message"),
    [
        ([[True] * 3, [True] * 4], spaces.Discrete(3), r"environment 1 must have 3 values for Discrete\(3\)"),
        ([[1, 0, np.nan]], spaces.Discrete(3), "environment 0 must have 3 values .* each True or False"),
        ([[1, 0, 2]], spaces.Discrete(3), "each True or False"),
        ([["yes", "no", "no"]], spaces.Discrete(3), "each True or False"),
        ([None], spaces.Discrete(3), "it is None"),
        ([[[True, True], [True]]], spaces.MultiDiscrete([2, 1]), r"must have 3 values for MultiDiscrete\(\[2 1\]\)"),
        ([[True] * 3], spaces.MultiBinary(3), r"must have 6 values for MultiBinary\(3\)"),
        ([[True, True], [False, False]], spaces.Discrete(2), "environment 1 allows no action"),
        ([[True, True, False, False]], spaces.MultiDiscrete([2, 2]), "environment 0 allows no action"),
    ],
)
def test_masks_that_cannot_be_used_are_refused(masks, space, message):
    with pytest.raises(ValueError, match=message):
        check_masks(masks, space)
    # Numbers as in PettingZoo are taken
    assert check_masks([np.array([1, 0], np.int8)], spaces.Discrete(2)).tolist() == [[True, False]]


class Grows(Corridor):
    """A callback may make it longer, so its masks change between two steps."""

    longest = 2

    def observe(self):
        return np.array([min(self.place, 4)], np.float32)

    def action_masks(self):
        return [self.place > 0, self.place < self.longest]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.longest
        return self.observe(), {}

    def lengthen(self, by):
        self.longest += by


class Lengthens(BaseCallback):
    def __init__(self, hook):
        super().__init__()
        self.hook, self.by = hook, 1

    def _change(self, hook):
        if hook == self.hook:
            # The last place becomes the last but one, and the other way round: only one of the two may go right
            self.training_env.env_method("lengthen", self.by)
            self.by = -self.by

    def _on_rollout_start(self):
        self._change("start")

    def _on_step(self):
        self._change("step")
        return True


@pytest.mark.parametrize("hook", ["start", "step"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_callback_may_change_the_environment_and_with_it_the_masks(algorithm, hook):
    """The environment refuses what is forbidden at the step."""
    model_of(algorithm, make_vec_env(Grows, 2, seed=0)).learn(120, Lengthens(hook))


class CallsThePolicy(BaseCallback):
    """With other observations, and with those of the rollout, as callbacks that log values do."""

    def _call(self):
        with th.no_grad():
            self.model.policy(th.zeros(9, 1))
            self.model.policy.predict_values(th.zeros(9, 1))
            self.model.predict(np.zeros((3, 1), np.float32))
            if (obs := self.locals.get("new_obs")) is not None:
                self.model.policy.predict_values(th.as_tensor(obs))

    def _on_rollout_start(self):
        self._call()

    def _on_step(self):
        self._call()
        return True

    def _on_rollout_end(self):
        self._call()


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("algorithm", [QPPO, PQN])
def test_a_callback_may_call_the_policy_and_changes_nothing(algorithm, n_envs):
    """Greedy and without exploration, so that its calls draw nothing that the run needs; rewards have the bootstrap."""
    found = []
    for callback in (None, CallsThePolicy()):
        kwargs = dict(exploration_initial_eps=0.0, exploration_final_eps=0.0) if algorithm is PQN else {}
        model = model_of(algorithm, make_vec_env(lambda: Corridor(n_actions=4), n_envs, seed=0), n_epochs=1, **kwargs)
        model.policy.forward = (lambda original: lambda obs, *_: original(obs, True))(model.policy.forward)
        model.learn(16 * n_envs, callback)
        found.append(model.rollout_buffer)
    for name in ("rewards", "values", "actions"):
        np.testing.assert_array_equal(getattr(found[0], name), getattr(found[1], name))


class OwnForward(ActorCriticQPolicy):
    def forward(self, obs, deterministic=False):
        distribution, q_values, log_probs = self._actor_critic(obs)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, (log_probs.exp() * q_values).sum(dim=1, keepdim=True), distribution.log_prob(actions)

    def predict_values(self, obs):
        q_values, log_probs = self.evaluate_all_actions(obs)
        return (log_probs.exp() * q_values).sum(dim=1, keepdim=True)


@pytest.mark.parametrize("algorithm", [QA2C, QPPO])
def test_a_policy_with_a_forward_of_its_own_is_masked(algorithm):
    found = []
    for policy in ("MlpPolicy", OwnForward):
        model = model_of(algorithm, make_vec_env(Corridor, 2, seed=0), policy).learn(80)
        found.append(th.nn.utils.parameters_to_vector(model.policy.parameters()))
    # They draw alike, so they learn alike
    th.testing.assert_close(*found)


class NotAMethod(Corridor):
    def __init__(self, value, **kwargs):
        super().__init__(**kwargs)
        self.action_masks = value

    def step(self, action):
        self.n += 1
        return self.observe(), float(action), self.n >= 6, False, {}


@pytest.mark.parametrize("value", [None, np.ones(2)], ids=["None", "array"])
def test_an_attribute_that_is_no_method_is_no_mask(value):
    model_of(QA2C, make_vec_env(lambda: NotAMethod(value), 2)).learn(20)


def test_environments_of_which_some_have_masks_are_refused():
    env = DummyVecEnv([lambda: Corridor(), lambda: NotAMethod(None)])
    with pytest.raises(ValueError, match=r"Of 2 environments, only \[0\] have `action_masks`"):
        model_of(QA2C, env).learn(10)


def test_continuous_actions_have_no_masks():
    env = make_vec_env("Pendulum-v1", 2, wrapper_class=lambda env: ActionMasker(env, lambda _: [True]))
    model = model_of(REINFORCE, env).learn(400)
    with pytest.raises(ValueError, match="Only finite actions can be masked, but the action space is Box"):
        model.predict(env.reset(), action_masks=[True])


def test_an_evaluation_shares_its_masks_with_no_other():
    """A nested evaluation has another environment, and sb3-contrib's does as it is told."""
    plain = make_vec_env(lambda: NotAMethod(None), 3)
    inner = EvalCallback(plain, eval_freq=1, n_eval_episodes=3, verbose=0)
    asked = make_vec_env(Fickle, 1)
    unmasked = MaskableEvalCallback(asked, eval_freq=10, n_eval_episodes=1, verbose=0, use_masking=False)
    outer = EvalCallback(make_vec_env(Corridor, 1), eval_freq=10, n_eval_episodes=1, verbose=0, callback_after_eval=inner)
    model_of(QA2C, make_vec_env(Corridor, 2)).learn(60, [outer, unmasked])
    assert not hasattr(asked.unwrapped.envs[0].unwrapped, "asked")


@pytest.mark.parametrize(
    ("toy", "masks", "only"),
    [
        ((InvalidActionEnvMultiDiscrete, dict(dims=[2, 2])), [[1, 0], [0, 1]], [0, 1]),
        ((InvalidActionEnvMultiDiscrete, dict(dims=[2, 2])), [1, 0, 0, 1], [0, 1]),
        ((InvalidActionEnvMultiBinary, dict(dims=2)), [[0, 1], [1, 0]], [1, 0]),
    ],
)
def test_a_mask_may_have_a_row_for_each_component(toy, masks, only):
    """As for MaskablePPO."""
    model = model_of(QPPO, env_of(toy))
    obs = model.get_env().reset()[0]
    assert model.predict(obs, action_masks=masks)[0].tolist() == only
    assert model.predict(np.stack([obs, obs]), action_masks=np.array([masks, masks]))[0].tolist() == [only, only]


def test_a_resumed_run_masks_as_its_learn_says(tmp_path):
    class Stops(BaseCallback):
        def __init__(self, at):
            super().__init__()
            self.at = at

        def _on_step(self):
            return self.num_timesteps < self.at

    for at, use_masking in ((80, False), (160, True)):
        model = model_of(QA2C, make_vec_env(lambda: NotAMethod(None), 2, seed=0))
        checkpoints = ExactCheckpointCallback(tmp_path, save_freq=32, verbose=0)
        model.learn(400, [checkpoints, Stops(at)], use_masking=use_masking)
        assert model.use_masking == use_masking


def test_a_model_with_masks_is_the_model_in_everything_else():
    env = make_vec_env(Corridor, 2)
    model = model_of(QA2C, env)
    masked = with_masks(model, env)
    masked.ent_coef = 0.5
    assert model.ent_coef == 0.5 and masked.policy is model.policy and copy.copy(masked).policy is model.policy
    # Without masks there is nothing to add
    assert with_masks(model, make_vec_env(IdentityEnv, 2)) is model


@pytest.mark.parametrize("dtype", [th.float16, th.bfloat16, th.float32, th.float64], ids=str)
@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.MultiDiscrete([3, 2])], ids=str)
def test_forbidden_actions_have_probability_and_gradient_of_exactly_zero(space, dtype):
    logits = th.randn(7, 5).to(dtype).requires_grad_()
    masks = th.tensor([[True, False, True, True, False]]).expand(7, 5)
    joint = JointActions(space)
    unmasked = make_proba_distribution(space) if isinstance(space, spaces.Discrete) else JointDistribution(joint)
    log_probs = mask_distribution(unmasked, logits, masks).distribution.logits
    assert (log_probs.exp()[~joint.allowed(masks)] == 0).all()
    loss = all_action_policy_loss(log_probs, th.randn(log_probs.shape).to(dtype)) + negative_entropy(log_probs)
    (gradient,) = th.autograd.grad(loss, logits)
    assert loss.isfinite() and (gradient[~masks] == 0).all() and (gradient[masks] != 0).any()


class Fickle(Corridor):
    """Answers otherwise each time that it is asked."""

    def action_masks(self):
        self.asked = getattr(self, "asked", 0) + 1
        return [self.asked % 2 == 0, self.asked % 2 == 1]

    def step(self, action):
        self.n += 1
        return self.observe(), float(action), self.n >= 6, False, {}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_mask_of_a_step_is_asked_for_once(algorithm):
    """So an environment that changes its mind is trained with what it said when the action was chosen."""
    env = make_vec_env(Fickle, 1, seed=0)
    actions = TakenActions()
    model = model_of(algorithm, env).learn(48, actions)
    rollouts = {REINFORCE: 8, QA2C: 10, QPPO: 3, PQN: 3}[algorithm]
    # Before each step, and after the last one of a rollout
    assert env.unwrapped.envs[0].unwrapped.asked == model.num_timesteps + rollouts
    assert actions.taken == {0, 1}


def test_a_policy_without_masks_is_refused_where_the_environment_has_them():
    from stable_baselines3.common.policies import ActorCriticPolicy

    model = model_of(REINFORCE, make_vec_env(Corridor, 2), ActorCriticPolicy)
    with pytest.raises(ValueError, match=r"ActorCriticPolicy cannot be masked: .* `learn\(..., use_masking=False\)`"):
        model.learn(10)


def test_masks_must_be_of_as_many_observations():
    model = model_of(QPPO, make_vec_env(Corridor, 2))
    with pytest.raises(ValueError, match="action masks of 1 observations, but 3 were given"):
        model.predict(np.zeros((3, 1), np.float32), action_masks=[True, False])
    for unusable in ([True], [[True, False], [True]], [False, False], "left"):
        with pytest.raises(ValueError, match=r"The action mask of environment [01] "):
            model.predict(np.zeros(1, np.float32), action_masks=unusable)


def test_a_compiled_policy_is_masked():
    env = make_vec_env(Corridor, 2, seed=0)
    model = model_of(QPPO, env)
    model.policy.compile(backend="eager", fullgraph=True)
    model.learn(64)
