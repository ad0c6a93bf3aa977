"""Algorithms are compared on the same network: the faster one is the one that SB3 would have built, whatever the algorithm."""

import copy
import inspect
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from sb3_contrib import QRDQN
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.policies import ActorCriticCnnPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import NatureCNN
from stable_baselines3.common.utils import obs_as_tensor, polyak_update
from torch import nn

from sb3_qac import QA2C, QPPO
from sb3_qac.common.buffers import DeviceRolloutBuffer
from sb3_qac.common.policies import PixelActorCriticCnnPolicy
from sb3_qac.common.torch_layers import LeanNatureCNN, MinAtarCNN
from sb3_qac.pqn import PQN
from sb3_qac.qa2c.policies import ActorCriticQCnnPolicy, MultiInputActorCriticQPolicy
from sb3_qac.study.catalogue import STUDIES, TASKS, study_of
from sb3_qac.study.manager import StudyManager, use_device_buffer, use_lean_cnn
from sb3_qac.study.run import Run
from sb3_qac.zoo import register

PONG, SPACE_INVADERS, MINATAR = "PongNoFrameskip-v4", "SpaceInvadersNoFrameskip-v4", "MinAtar/Breakout-v1"
# Of DQN, so that the buffer of its preset is not made
SMALL_BUFFER = {"buffer_size": 10}


def images(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 4, 84, 84), dtype=np.uint8)


def image_env():
    return FakeImageEnv(action_dim=6, screen_height=84, screen_width=84, n_channels=4, channel_first=True)


def shapes(model):
    return {name: tuple(value.shape) for name, value in model.policy.state_dict().items()}


def outputs(model, obs):
    """What the networks of a model say of observations: of actors and critics, or of Q-networks."""
    policy, obs = model.policy, obs_as_tensor(obs, model.device)
    with th.no_grad():
        for name in ("q_net", "quantile_net"):
            if hasattr(policy, f"{name}_target"):
                return [getattr(policy, name)(obs), getattr(policy, f"{name}_target")(obs)]
        return [policy.get_distribution(obs).distribution.logits, policy.predict_values(obs)]


def study_model(name, folder, **settings):
    """The model of a study's run, as the study makes it."""
    register()
    algo, hyperparams = TASKS.get(name, (name, {}))
    hyperparams = {**hyperparams, "n_envs": 2, **(SMALL_BUFFER if algo == "dqn" else {})}
    run = Run(name, name, algo, seed=0, folder=str(folder), hyperparams=hyperparams, n_eval_episodes=1, **settings)
    manager = StudyManager(run)
    try:
        model, _ = manager.setup_experiment()
        return model
    finally:
        for env in manager.envs:
            env.close()


NO_LAYERS = dict(net_arch=[])


@pytest.mark.parametrize(
    ("algorithm", "policy", "given"),
    [
        *((algorithm, "CnnPolicy", NO_LAYERS) for algorithm in (A2C, PPO, DQN, QRDQN)),
        # Policies of this package
        *((algorithm, "CnnPolicy", {}) for algorithm in (QA2C, QPPO)),
        (A2C, PixelActorCriticCnnPolicy, {}),
        (A2C, PixelActorCriticCnnPolicy, dict(net_arch=None)),
    ],
)
def test_lean_cnn_has_the_network_that_sb3_builds(algorithm, policy, given):
    kwargs = dict(buffer_size=10) if algorithm in (DQN, QRDQN) else {}
    kwargs |= dict(n_steps=8, batch_size=8) if algorithm in (PPO, QPPO) else {}
    assert len({NatureCNN, LeanNatureCNN}) == 2
    plain = algorithm("CnnPolicy", image_env(), seed=0, **kwargs)
    lean = algorithm(
        policy, image_env(), policy_kwargs=dict(features_extractor_class=LeanNatureCNN, **given), seed=0, **kwargs
    )
    assert shapes(lean) == shapes(plain)
    for actual, expected in zip(outputs(lean, images(8)), outputs(plain, images(8)), strict=True):
        th.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# All names of a study that are for images: those with a body of their own are for vectors
FOR_IMAGES = [
    name for name, (algo, hyperparams) in TASKS.items() if algo != "reinforce" and "policy_kwargs" not in hyperparams
]


@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        *((name, PONG) for name in ("a2c", "dqn", "qppo")),
        *(pytest.param(name, PONG, marks=pytest.mark.slow) for name in FOR_IMAGES),
        # With layers before each head
        ("qa2c", SPACE_INVADERS),
    ],
)
def test_a_study_trains_the_network_of_stock_sb3(name, env_id, tmp_path):
    stock, native = (
        study_model(name, tmp_path / str(dtype), env_id=env_id, native=False, dtype=dtype) for dtype in (None, "float32")
    )
    assert type(native.policy.features_extractor if name != "dqn" else native.policy.q_net.features_extractor) is LeanNatureCNN
    assert shapes(native) == shapes(stock)
    for actual, expected in zip(outputs(native, images(8)), outputs(stock, images(8)), strict=True):
        th.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_qppo_trains_images_with_the_adam_of_sb3_computed_faster(tmp_path):
    preset = study_model("qppo", tmp_path, env_id=PONG)
    sb3 = PPO("CnnPolicy", image_env(), n_steps=8, batch_size=8, learning_rate=preset.learning_rate)
    assert type(preset.policy.optimizer) is type(sb3.policy.optimizer) is th.optim.Adam
    fused = preset.policy.optimizer.defaults
    assert fused == {**sb3.policy.optimizer.defaults, "fused": True}
    weights = [th.nn.Parameter(th.linspace(-1, 1, 1001)) for _ in range(2)]
    optimizers = th.optim.Adam([weights[0]], **fused), th.optim.Adam([weights[1]], **{**fused, "fused": None})
    for step in range(3):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = th.linspace(-1e-3, 1e-2, 1001) ** (1 + 2 * step)
            optimizer.step()
    th.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)


def trunk_and_actor(model):
    return {name: shape for name, shape in shapes(model).items() if "value_net" not in name and "q_net" not in name}


ENVS = sorted({env_id for name in STUDIES for env_id in study_of(name).env_ids})
IN_SHORT = ("CartPole-v1", MINATAR)


@pytest.mark.parametrize(
    "env_id", [*IN_SHORT, *(pytest.param(env_id, marks=pytest.mark.slow) for env_id in ENVS if env_id not in IN_SHORT)]
)
def test_qa2c_is_compared_with_a2c_on_the_same_network(env_id, tmp_path):
    """All but the critic's last layer, which has a value per action instead of one per state."""
    a2c, qa2c = (study_model(name, tmp_path / name, env_id=env_id) for name in ("a2c", "all-action"))
    assert trunk_and_actor(qa2c) == trunk_and_actor(a2c)
    n_features = a2c.policy.value_net.in_features
    n_actions = gym.make(env_id).action_space.n if "NoFrameskip" not in env_id else 6
    assert a2c.policy.value_net.weight.shape == (1, n_features)
    assert qa2c.policy.q_net.weight.shape == (n_actions, n_features)
    assert type(qa2c.policy.mlp_extractor.policy_net) is type(a2c.policy.mlp_extractor.policy_net)
    activations = [[type(layer) for layer in model.policy.mlp_extractor.value_net] for model in (a2c, qa2c)]
    assert activations[0] == activations[1]


LAYERS = (th.nn.Conv2d, th.nn.Linear)


# With two environments the rollout is smaller than a minibatch
@pytest.mark.filterwarnings("ignore:.*mini-?batch:UserWarning")
@pytest.mark.parametrize(
    ("env_id", "peers"), [(MINATAR, ("pqn", "ppo")), pytest.param(PONG, ("pqn",), marks=pytest.mark.slow)]
)
def test_qppo_is_compared_with_its_peers_on_the_same_trunk(env_id, peers, tmp_path):
    """Normalisation is no part of the trunk: on MinAtar the searches chose it, on Atari PQN has it as published."""

    def trunk(name):
        model = study_model(name, tmp_path / name, env_id=env_id)
        layers = (module for module in model.policy.features_extractor.modules() if isinstance(module, LAYERS))
        return [tuple(parameter.shape) for layer in layers for parameter in layer.parameters()]

    expected = trunk("qppo")
    assert expected and all(trunk(name) == expected for name in peers)


@pytest.mark.filterwarnings("ignore:.*mini-?batch:UserWarning")
@pytest.mark.parametrize("env_id", [MINATAR, pytest.param(PONG, marks=pytest.mark.slow)])
def test_qppo_and_its_variant_on_the_sampled_action_have_the_same_network(env_id, tmp_path):
    """All of it, normalisation too: they differ in the estimator only."""
    qppo, sampled = (study_model(name, tmp_path / name, env_id=env_id) for name in ("qppo", "qppo-sampled"))
    assert shapes(sampled) == shapes(qppo) and repr(sampled.policy) == repr(qppo.policy)


ABLATION = {name: changes for name, (_, changes) in STUDIES["ablation"].tasks.items()}


@pytest.fixture(scope="module")
def qppo(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*mini-?batch", UserWarning)
        return study_model("qppo", tmp_path_factory.mktemp("qppo"), env_id=MINATAR)


@pytest.mark.filterwarnings("ignore:.*mini-?batch:UserWarning")
@pytest.mark.parametrize("name", ABLATION)
def test_a_row_of_the_ablation_changes_one_part_of_qppo(name, qppo, tmp_path):
    row = study_model(name, tmp_path / name, env_id=MINATAR)
    names = set(inspect.signature(QPPO).parameters) - {"tensorboard_log"}
    settings = [x for x in names if isinstance(getattr(qppo, x, None), int | float | str | None)]
    assert {"beta", "shrinkage", "normalize_advantage", "kl_coef", "n_epochs", "policy_gradient"} <= set(settings)
    changed = {x: getattr(row, x) for x in settings if getattr(row, x, None) != getattr(qppo, x, None)}
    if "policy_kwargs" not in ABLATION[name]:
        assert changed == ABLATION[name] and repr(row.policy) == repr(qppo.policy)
        return
    if name == "qppo-no-dueling":
        head = shapes(qppo).keys() - shapes(row).keys()
        assert changed == {} and all("value_net" in x or "advantage_net" in x for x in head) and len(head) == 4
        assert row.policy.q_net.out_features == row.action_space.n
        assert repr(row.policy.features_extractor) == repr(qppo.policy.features_extractor)
        assert repr(row.policy.action_net) == repr(qppo.policy.action_net)
        assert repr(row.policy.optimizer) == repr(qppo.policy.optimizer)
        return
    # The normalisation of two layers is added, and the rest of the network stays
    norms = (nn.GroupNorm, nn.LayerNorm)
    layers, others = ([type(x) for x in model.policy.features_extractor.modules()] for model in (row, qppo))
    assert changed == {} and [x for x in layers if x not in norms] == others and len(layers) == len(others) + 2
    assert repr(row.policy.q_net) == repr(qppo.policy.q_net) and repr(row.policy.optimizer) == repr(qppo.policy.optimizer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", [A2C, QA2C])
def test_images_come_the_same_way_into_rollouts_updates_and_predict(algorithm, dtype):
    """Bit by bit, by SB3's way of floats too, in bfloat16 as well."""
    kwargs = dict(features_extractor_class=LeanNatureCNN, features_extractor_kwargs=dict(dtype=dtype))
    model = algorithm("CnnPolicy", image_env(), policy_kwargs=kwargs, seed=0)
    policy, obs = model.policy, obs_as_tensor(images(8), model.device)
    extractor = policy.features_extractor
    with th.no_grad():
        th.testing.assert_close(extractor(obs), extractor(obs.float() / 255), rtol=0, atol=0)
        logits = policy.get_distribution(obs).distribution.logits
        actions = th.arange(8) % 6
        _, log_prob, _ = policy.evaluate_actions(obs, actions)
        th.testing.assert_close(log_prob, logits[th.arange(8), actions], rtol=0, atol=0)
        _, values, _ = policy(obs)
        th.testing.assert_close(values, policy.predict_values(obs), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [np.float32, np.int64])
@pytest.mark.parametrize("policy", ["CnnPolicy", PixelActorCriticCnnPolicy])
def test_pixels_of_another_type_are_pixels(policy, kind):
    """As for SB3's policies with ``NatureCNN``: ``predict`` takes what the user made of an image."""
    algorithm = QA2C if policy == "CnnPolicy" else A2C
    model = algorithm(policy, image_env(), policy_kwargs=dict(features_extractor_class=LeanNatureCNN), seed=0)
    pixels, others = (model.policy.obs_to_tensor(images(4).astype(dtype))[0] for dtype in (np.uint8, kind))
    with th.no_grad():
        values, same = model.policy.predict_values(pixels), model.policy.predict_values(others)
    th.testing.assert_close(same, values, rtol=0, atol=0)


def test_images_that_sb3_normalises_are_the_same_with_the_checks_of_nature_cnn_switched_off():
    features = []
    for extractor in (NatureCNN, LeanNatureCNN):
        kwargs = dict(features_extractor_class=extractor, features_extractor_kwargs=dict(normalized_image=True))
        policy = QA2C("CnnPolicy", image_env(), policy_kwargs=kwargs, seed=0).policy
        with th.no_grad():
            features.append(policy.extract_features(policy.obs_to_tensor(images(4))[0]))
    th.testing.assert_close(features[1], features[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("algorithm", "policy"), [(QA2C, "CnnPolicy"), (A2C, PixelActorCriticCnnPolicy)])
def test_layers_that_were_given_are_behind_the_lean_cnn_too(algorithm, policy):
    plain, lean = (
        algorithm(name, image_env(), policy_kwargs=dict(features_extractor_class=extractor, net_arch=[32]))
        for name, extractor in (("CnnPolicy", NatureCNN), (policy, LeanNatureCNN))
    )
    assert shapes(lean) == shapes(plain)
    assert lean.policy.mlp_extractor.latent_dim_pi == 32


class OwnCNN(LeanNatureCNN):
    pass


@pytest.mark.parametrize(
    ("given", "used"), [(NatureCNN, LeanNatureCNN), (LeanNatureCNN, LeanNatureCNN), (OwnCNN, OwnCNN), (MinAtarCNN, MinAtarCNN)]
)
def test_a_study_computes_nature_cnn_faster_and_leaves_other_networks_alone(given, used):
    dtype = "bfloat16" if used is LeanNatureCNN else "float32"
    hyperparams = dict(policy="CnnPolicy", policy_kwargs=dict(features_extractor_class=given, features_extractor_kwargs=None))
    use_lean_cnn(A2C, hyperparams, dtype)
    assert hyperparams["policy_kwargs"]["features_extractor_class"] is used
    assert hyperparams["policy_kwargs"]["features_extractor_kwargs"] == (dict(dtype=dtype) if used is LeanNatureCNN else None)


class OwnCnnPolicy(ActorCriticCnnPolicy):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"features_extractor_class": OwnCNN, **kwargs})


@pytest.mark.parametrize("policy", ["MlpPolicy", OwnCnnPolicy])
def test_a_study_leaves_a_policy_alone_whose_default_is_another_network(policy):
    hyperparams = dict(policy=policy, policy_kwargs=dict(net_arch=[64]))
    use_lean_cnn(A2C, hyperparams, "float32")
    assert hyperparams == dict(policy=policy, policy_kwargs=dict(net_arch=[64]))
    with pytest.raises(ValueError, match="`dtype` is 'bfloat16', but the hyperparameters have a network of their own"):
        use_lean_cnn(A2C, hyperparams, "bfloat16")


class OwnLayersPolicy(ActorCriticCnnPolicy):
    def __init__(self, *args, net_arch=(32,), features_extractor_class=NatureCNN, **kwargs):
        super().__init__(*args, net_arch=list(net_arch), features_extractor_class=features_extractor_class, **kwargs)


@pytest.mark.parametrize(
    ("algorithm", "policy"),
    [
        (A2C, ActorCriticCnnPolicy),
        (A2C, OwnLayersPolicy),
        (DQN, "CnnPolicy"),
        (QA2C, ActorCriticQCnnPolicy),
        (PQN, "CnnPolicy"),
    ],
)
@pytest.mark.parametrize("given", [{}, dict(net_arch=[16])])
def test_a_study_computes_a_policy_faster_whose_default_is_nature_cnn(algorithm, policy, given):
    """With the layers that are behind NatureCNN."""
    kwargs = SMALL_BUFFER if algorithm is DQN else {}
    hyperparams = dict(policy=policy, policy_kwargs=given)
    plain = algorithm(env=image_env(), **copy.deepcopy(hyperparams), **kwargs)
    use_lean_cnn(algorithm, hyperparams, "bfloat16")
    assert hyperparams["policy_kwargs"]["features_extractor_class"] is LeanNatureCNN
    assert shapes(algorithm(env=image_env(), **hyperparams, **kwargs)) == shapes(plain)


def test_a_study_does_not_replace_the_precision_that_the_hyperparameters_name():
    hyperparams = dict(policy="CnnPolicy", policy_kwargs=dict(features_extractor_kwargs=dict(dtype="bfloat16")))
    with pytest.raises(ValueError, match="`dtype` is 'float32', but the hyperparameters have 'bfloat16'"):
        use_lean_cnn(A2C, hyperparams, "float32")
    use_lean_cnn(A2C, hyperparams, "bfloat16")
    assert hyperparams["policy_kwargs"]["features_extractor_kwargs"] == dict(dtype="bfloat16")


@pytest.mark.parametrize(
    ("algorithm", "policy", "on_device"),
    [
        (PPO, "CnnPolicy", True),
        (PPO, ActorCriticCnnPolicy, True),
        (PPO, "MultiInputPolicy", False),
        (PPO, MultiInputActorCriticPolicy, False),
        (QA2C, MultiInputActorCriticQPolicy, False),
        (PQN, "CnnPolicy", True),
        (PQN, "MultiInputPolicy", False),
        (DQN, "CnnPolicy", False),
    ],
)
def test_a_study_keeps_rollouts_on_the_device_but_for_dict_observations(algorithm, policy, on_device):
    hyperparams = dict(policy=policy)
    use_device_buffer(algorithm, hyperparams)
    assert hyperparams == dict(policy=policy, **(dict(rollout_buffer_class=DeviceRolloutBuffer) if on_device else {}))


def test_a_target_network_follows_its_network_in_bfloat16():
    """SB3's ``polyak_update`` writes through ``.data``, of which autograd's counters do not know."""
    kwargs = dict(features_extractor_class=LeanNatureCNN, features_extractor_kwargs=dict(dtype="bfloat16"))
    model = DQN("CnnPolicy", image_env(), buffer_size=10, policy_kwargs=kwargs, seed=0)
    obs = th.as_tensor(images(2))
    with th.no_grad():
        before = model.q_net_target(obs)
        for parameter in model.q_net.parameters():
            parameter.mul_(0.5)
        polyak_update(model.q_net.parameters(), model.q_net_target.parameters(), tau=1.0)
        th.testing.assert_close(model.q_net_target(obs), model.q_net(obs), rtol=0, atol=0)
        assert (model.q_net(obs) - before).norm() > 0.1 * before.norm()
