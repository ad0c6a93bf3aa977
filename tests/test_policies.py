"""The policies alone: the Q head, the value of a state, initialisation, and loading without an algorithm."""

import importlib
import inspect
import re
from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import NatureCNN
from stable_baselines3.common.utils import ConstantSchedule, set_random_seed
from torch import nn

from sb3_qac.qa2c import QA2C, CnnPolicy, MlpPolicy, MultiInputPolicy

N_ACTIONS, BATCH_SIZE = 5, 6
VECTOR = spaces.Box(-1, 1, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (4, 36, 36), np.uint8)
DICT = spaces.Dict(vector=VECTOR, image=IMAGE)

POLICIES = pytest.mark.parametrize(
    ("policy_class", "observation_space"),
    [
        pytest.param(MlpPolicy, VECTOR, id="MlpPolicy"),
        pytest.param(CnnPolicy, IMAGE, id="CnnPolicy"),
        pytest.param(MultiInputPolicy, DICT, id="MultiInputPolicy"),
    ],
)
TRUNKS = pytest.mark.parametrize("share_features_extractor", [True, False], ids=["shared", "separate"])


def make(policy_class, observation_space, seed=0, **kwargs):
    set_random_seed(seed)
    return policy_class(observation_space, spaces.Discrete(N_ACTIONS), ConstantSchedule(1e-3), **kwargs)


def observe(policy):
    policy.observation_space.seed(0)
    samples = [policy.observation_space.sample() for _ in range(BATCH_SIZE)]
    if isinstance(policy.observation_space, spaces.Dict):
        samples = {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
    else:
        samples = np.stack(samples)
    return policy.obs_to_tensor(samples)[0]


@POLICIES
@TRUNKS
def test_values_are_the_mean_of_q_under_the_policy(policy_class, observation_space, share_features_extractor):
    policy = make(policy_class, observation_space, share_features_extractor=share_features_extractor)
    obs = observe(policy)
    with th.no_grad():
        q_values = policy.predict_q_values(obs)
        probs = policy.get_distribution(obs).distribution.probs
        actions, values, log_prob = policy(obs)
        all_q_values, log_probs = policy.evaluate_all_actions(obs)
        evaluated = policy.evaluate_actions(obs, actions)

    assert q_values.shape == all_q_values.shape == log_probs.shape == (BATCH_SIZE, N_ACTIONS)
    expected = (probs * q_values).sum(1, keepdim=True)
    assert expected.shape == (BATCH_SIZE, 1) and expected.std() > 0
    for actual in (values, policy.predict_values(obs), evaluated[0]):
        th.testing.assert_close(actual, expected)
    th.testing.assert_close(all_q_values, q_values)
    th.testing.assert_close(log_probs, probs.log())
    th.testing.assert_close(log_prob, probs.log()[range(BATCH_SIZE), actions])
    th.testing.assert_close(evaluated[1], log_prob)
    th.testing.assert_close(evaluated[2], -(probs * probs.log()).sum(1))


def test_loss_of_the_values_that_sb3_evaluates_does_not_train_the_actor():
    """SB3's A2C and PPO may have this policy. With their own policy nothing of this loss reaches the actor's head."""
    policy = make(MlpPolicy, VECTOR)
    obs = observe(policy)
    values, _, _ = policy.evaluate_actions(obs, th.zeros(BATCH_SIZE))
    (10 - values).square().mean().backward()
    assert policy.action_net.weight.grad is None
    assert policy.q_net.weight.grad.abs().sum() > 0


@POLICIES
@TRUNKS
def test_trunk_and_actor_start_as_in_a2c(policy_class, observation_space, share_features_extractor):
    """So that a run of QA2C and one of A2C with the same seed differ by the algorithm alone."""
    ours = make(policy_class, observation_space, share_features_extractor=share_features_extractor)
    stock_class = next(cls for cls in policy_class.__mro__ if cls.__module__.startswith("stable_baselines3"))
    stock = make(stock_class, observation_space, share_features_extractor=share_features_extractor)
    assert issubclass(stock_class, ActorCriticPolicy)
    expected = {name: value for name, value in stock.state_dict().items() if not name.startswith("value_net")}
    actual = {name: value for name, value in ours.state_dict().items() if not name.startswith("q_net")}
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        th.testing.assert_close(actual[name], value, rtol=0, atol=0)


@POLICIES
def test_q_head_replaces_the_value_head_and_is_orthogonal(policy_class, observation_space):
    policy = make(policy_class, observation_space)
    assert not hasattr(policy, "value_net")
    weight = policy.q_net.weight.detach()
    th.testing.assert_close(weight @ weight.T, th.eye(N_ACTIONS), rtol=0, atol=1e-5)
    assert not policy.q_net.bias.any()


@POLICIES
def test_a_dueling_head_centres_its_advantages_and_is_orthogonal(policy_class, observation_space):
    policy = make(policy_class, observation_space, dueling=True)
    head, obs = policy.q_net, observe(policy)
    latent = []
    head.register_forward_hook(lambda _, args, output: latent.append(args[0]))
    q_values = policy.predict_q_values(obs)
    values, advantages = head.value_net(latent[0]), head.advantage_net(latent[0])
    for action in range(N_ACTIONS):
        expected = values[:, 0] + advantages[:, action] - sum(advantages[:, other] for other in range(N_ACTIONS)) / N_ACTIONS
        th.testing.assert_close(q_values[:, action], expected)
    assert advantages.std(dim=1).min() > 0
    for linear, n_outputs in ((head.value_net, 1), (head.advantage_net, N_ACTIONS)):
        weight = linear.weight.detach()
        th.testing.assert_close(weight @ weight.T, th.eye(n_outputs), rtol=0, atol=1e-5)
        assert not linear.bias.any()


def test_with_a_dueling_head_an_update_for_one_action_moves_the_values_of_all():
    """One step of gradient descent on Q(s, 2) at fixed features: V moves all by 1, the centred A by 1 - 1/n and -1/n."""
    for dueling in (False, True):
        head = make(MlpPolicy, VECTOR, dueling=dueling).q_net
        features = th.ones(1, 64) / 8
        before = head(features)
        (before[0, 2] * -1).backward()
        with th.no_grad():
            for parameter in head.parameters():
                parameter -= parameter.grad
        # The features have norm 1, and the bias counts like one more feature of 1
        own = th.eye(N_ACTIONS)[2]
        expected = 2 * (1 + own - 1 / N_ACTIONS) if dueling else 2 * own
        th.testing.assert_close((head(features) - before)[0].detach(), expected, rtol=0, atol=1e-5)


@POLICIES
@TRUNKS
def test_optimizer_holds_every_parameter_once(policy_class, observation_space, share_features_extractor):
    policy = make(policy_class, observation_space, share_features_extractor=share_features_extractor)
    held = [id(parameter) for group in policy.optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in policy.parameters())


@TRUNKS
def test_critic_moves_the_actors_trunk_only_when_they_share_it(share_features_extractor):
    policy = make(CnnPolicy, IMAGE, share_features_extractor=share_features_extractor)
    policy.predict_q_values(observe(policy)).sum().backward()
    moved = [parameter.grad is not None for parameter in policy.pi_features_extractor.parameters()]
    assert all(moved) if share_features_extractor else not any(moved)


def test_net_arch_and_activation_are_those_asked_for():
    policy = make(MlpPolicy, VECTOR, net_arch=dict(pi=[7], vf=[9, 11]), activation_fn=nn.ReLU)
    assert (policy.action_net.in_features, policy.q_net.in_features, policy.q_net.out_features) == (7, 11, N_ACTIONS)
    assert isinstance(policy.mlp_extractor.policy_net[1], nn.ReLU)
    assert isinstance(make(CnnPolicy, IMAGE).features_extractor, NatureCNN)


@POLICIES
def test_parameters_are_those_of_sb3_s_policies_without_continuous_actions(policy_class, observation_space):
    stock_class = next(cls for cls in policy_class.__mro__ if cls.__module__.startswith("stable_baselines3"))
    ours, stock = (dict(inspect.signature(cls).parameters) for cls in (policy_class, stock_class))
    assert re.findall(r":param (\w+):", policy_class.__doc__) == list(ours)
    assert ours.pop("kwargs").kind is inspect.Parameter.VAR_KEYWORD
    if policy_class is MlpPolicy:
        dueling = ours.pop("dueling")
        assert (dueling.kind, dueling.default) == (inspect.Parameter.KEYWORD_ONLY, False)
        assert stock.keys() - ours.keys() == {"use_sde", "log_std_init", "full_std", "use_expln", "squash_output"}
    assert list(ours) == [name for name in stock if name in ours] and "features_extractor_class" in ours
    assert {name: ours[name].default for name in ours} == {name: stock[name].default for name in ours}


@POLICIES
def test_files_of_policies_hold_parameters_of_continuous_actions_and_load(policy_class, observation_space, tmp_path):
    """Those that SB3's policies write, as ours did before their parameters were spelt out."""
    policy = make(policy_class, observation_space)
    policy.save(tmp_path / "policy")
    data = th.load(tmp_path / "policy", weights_only=False)["data"]
    assert {"use_sde", "log_std_init", "full_std", "use_expln", "squash_output"} <= set(data)
    policy_class(**data)
    with pytest.raises(TypeError, match="net_arc"):
        make(policy_class, observation_space, net_arc=[8])


@pytest.mark.parametrize(
    "extractor",
    [partial(NatureCNN, features_dim=32), lambda space: NatureCNN(space, features_dim=32)],
    ids=["partial", "function"],
)
def test_features_extractor_is_any_callable(extractor, tmp_path):
    env = FakeImageEnv(screen_height=40, screen_width=40, n_channels=1)
    model = QA2C("CnnPolicy", env, policy_kwargs=dict(features_extractor_class=extractor), seed=0).learn(10)
    assert model.policy.features_extractor.features_dim == 32
    model.save(tmp_path / "model")
    assert QA2C.load(tmp_path / "model").policy.features_extractor.features_dim == 32


@POLICIES
@TRUNKS
@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "dueling"])
def test_policy_loads_alone(policy_class, observation_space, share_features_extractor, dueling, tmp_path):
    policy = make(policy_class, observation_space, share_features_extractor=share_features_extractor, dueling=dueling)
    policy.save(tmp_path / "policy")
    loaded = policy_class.load(tmp_path / "policy")
    obs = observe(policy)
    assert loaded.share_features_extractor == share_features_extractor
    th.testing.assert_close(loaded.predict_q_values(obs), policy.predict_q_values(obs), rtol=0, atol=0)
    th.testing.assert_close(loaded.predict_values(obs), policy.predict_values(obs), rtol=0, atol=0)


def test_deterministic_action_is_the_most_probable_not_the_most_valued():
    policy = make(MlpPolicy, VECTOR)
    with th.no_grad():
        policy.action_net.bias[2] += 10
        policy.q_net.bias[3] += 10
    assert policy.predict(np.zeros(3, np.float32), deterministic=True)[0] == 2


def test_continuous_actions_are_refused():
    with pytest.raises(ValueError, match=r"Discrete.*Use PPO"):
        MlpPolicy(VECTOR, VECTOR, ConstantSchedule(1e-3))


@pytest.mark.parametrize("name", ["PQN", "QA2C", "QPPO", "REINFORCE"])
def test_policies_are_imported_from_the_folder_of_their_algorithm(name):
    """As from ``stable_baselines3.a2c``."""
    package = importlib.import_module(f"sb3_qac.{name.lower()}")
    for policy, known in getattr(package, name).policy_aliases.items():
        assert getattr(package, policy) is known
