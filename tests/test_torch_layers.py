"""The lean Nature CNN is SB3's: same weights, same features, same learning, up to rounding."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import DtypeObservation
from stable_baselines3 import A2C
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.torch_layers import NatureCNN
from stable_baselines3.common.utils import polyak_update
from torch import nn
from torch.nn import functional as F

from sb3_qac import QA2C, QPPO
from sb3_qac.common.buffers import MaskableRolloutBuffer
from sb3_qac.common.torch_layers import LeanNatureCNN, MinAtarCNN, SharedMlp, constant_weights, convolve, pixel_blocks

IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)


def images(batch_size, seed=0):
    return th.randint(0, 256, (batch_size, 4, 84, 84), dtype=th.uint8, generator=th.Generator().manual_seed(seed))


def make(cls, **kwargs):
    th.manual_seed(0)
    return cls(IMAGE, **kwargs)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_features_are_those_of_nature_cnn(dtype, tolerance):
    plain, lean = make(NatureCNN), make(LeanNatureCNN, dtype=dtype)
    for name, value in plain.state_dict().items():
        th.testing.assert_close(lean.state_dict()[name], value, rtol=0, atol=0)
    with th.no_grad():
        expected = plain(images(8).float() / 255)
        for actual in (lean(images(8)), lean(images(8).float() / 255)):
            assert actual.dtype == th.float32
            assert (actual - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("shape", [(3, 4, 84, 84), (1, 1, 36, 40), (2, 3, 8, 8)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_pixel_blocks_are_those_of_torch(shape, channels_last):
    pixels = th.randint(0, 256, shape, generator=th.Generator().manual_seed(0)).bfloat16()
    expected = F.pixel_unshuffle(pixels, 4)
    if channels_last:
        # With one channel this is contiguous too, with other strides
        pixels = pixels.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    blocks = pixel_blocks(pixels)
    th.testing.assert_close(blocks, expected, rtol=0, atol=0)
    assert blocks.is_contiguous(memory_format=th.channels_last)


# The first layer of the Nature CNN, and others that are computed as they are
@pytest.mark.parametrize(
    ("side", "arguments", "with_gradient"),
    [
        (84, {}, False),
        (84, {}, True),
        (82, {}, False),
        (84, {"padding": 2}, False),
        (84, {"dilation": 2}, False),
        (84, {"groups": 4}, False),
        (84, {"stride": 2}, False),
        (84, {"kernel_size": 4}, False),
    ],
)
def test_a_convolution_in_bfloat16_is_that_of_torch(side, arguments, with_gradient):
    """Of whole numbers, whose sums are exact in every order: outputs, and gradients of the weights."""
    generator = th.Generator().manual_seed(0)
    layer = nn.Conv2d(4, 8, **{"kernel_size": 8, "stride": 4, **arguments})
    for parameter in layer.parameters():
        parameter.data = th.randint(-1, 2, parameter.shape, generator=generator).bfloat16()
    pixels = th.randint(0, 2, (2, 4, side, side), generator=generator).bfloat16().requires_grad_(with_gradient)
    inputs = [layer.weight, layer.bias, *([pixels] if with_gradient else [])]
    ours, expected = convolve(layer, pixels, layer.weight, layer.bias), layer(pixels)
    th.testing.assert_close(ours, expected, rtol=0, atol=0)
    weights = th.randint(0, 2, expected.shape, generator=generator).bfloat16() * (
        th.rand(expected.shape, generator=generator) < 0.1
    )
    for gradients in zip(*(th.autograd.grad((output * weights).sum(), inputs) for output in (ours, expected)), strict=True):
        th.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
# In bfloat16 the sums of the first layer have another order
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.01)])
def test_an_exported_network_is_the_same_in_common_operations(dtype, tolerance):
    lean = make(LeanNatureCNN, dtype=dtype)
    with th.no_grad():
        expected, exported, traced = lean(images(2)), th.export.export(lean, (images(2),)), th.jit.trace(lean, images(2))
        for each in (exported.module(), traced):
            assert (each(images(2)) - expected).norm() < tolerance * expected.norm()
    # Other formats have no operation that sees four pixels as one number
    assert not [node for node in exported.graph.nodes if node.target == th.ops.aten.view.dtype]


def test_no_images_have_no_features():
    assert make(LeanNatureCNN, dtype="bfloat16")(images(2)[:0]).shape == (0, 512)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_read_anew_at_each_call_whoever_changes_them(dtype):
    lean, batch = make(LeanNatureCNN, dtype=dtype), images(2)
    with th.no_grad():
        before = lean(batch)
        for parameter in lean.parameters():
            # Autograd's counters do not see it
            parameter.data.mul_(0.9)
        after = lean(batch)
        assert (before - after).norm() > 1e-2 * before.norm()
        th.testing.assert_close(after, make_like(lean)(batch), rtol=0, atol=0)


def make_like(lean):
    other = LeanNatureCNN(IMAGE, dtype=str(lean.dtype).removeprefix("torch."))
    other.load_state_dict(lean.state_dict())
    return other


def test_a_layer_that_was_replaced_is_the_one_that_is_computed():
    plain, lean = make(NatureCNN), make(LeanNatureCNN)
    # With this padding it has 21 x 21 positions instead of 20 x 20, which the next layer makes 9 x 9 too
    lean.cnn[0] = th.nn.Conv2d(4, 32, kernel_size=8, stride=4, padding=2, padding_mode="reflect")
    lean.linear[0] = th.nn.Linear(lean.linear[0].in_features, 512)
    plain.cnn, plain.linear = lean.cnn, lean.linear
    with th.no_grad():
        th.testing.assert_close(lean(images(2)), plain(images(2).float() / 255), rtol=1e-4, atol=1e-5)


class OwnCNN(LeanNatureCNN):
    """A network of the user's."""


@pytest.mark.parametrize("algorithm", [A2C, QA2C])
def test_a_subclass_has_the_layers_behind_it_that_a_subclass_of_nature_cnn_has(algorithm):
    class OwnNatureCNN(NatureCNN):
        pass

    plain, lean = (
        algorithm("CnnPolicy", FakeImageEnv(), policy_kwargs=dict(features_extractor_class=cls)).policy.mlp_extractor
        for cls in (OwnNatureCNN, OwnCNN)
    )
    assert repr(plain) == repr(lean) and len(lean.policy_net) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_kept_for_a_rollout_are_those_of_the_parameters(dtype):
    lean, batch = make(LeanNatureCNN, dtype=dtype), images(2)

    def features():
        with th.no_grad():
            kept = lean(batch)
            th.testing.assert_close(kept, make_like(lean)(batch), rtol=0, atol=0)
        return kept

    seen = []
    with constant_weights(lean):
        seen.append(features())
        made = lean._kept
        features()
        assert lean._kept is made
    assert lean._kept is None
    for parameter in lean.parameters():
        parameter.data.mul_(0.9)
    with constant_weights(lean):
        seen.append(features())
    for before, after in itertools.pairwise(seen):
        assert (before - after).norm() > 1e-2 * before.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_callback_that_swaps_averaged_weights_in_says_so(dtype):
    """With SB3's ``polyak_update``, which writes to ``.data``, within a rollout, which promises constant weights."""
    lean, averaged, batch = make(LeanNatureCNN, dtype=dtype), make(LeanNatureCNN, dtype=dtype), images(2)
    with th.no_grad(), constant_weights(lean):
        # All but the first weight of each layer
        for parameter in averaged.parameters():
            parameter.view(-1)[1:].mul_(1.5)
        before = lean(batch)
        kept = copy.deepcopy(lean)
        with constant_weights(lean):
            polyak_update(averaged.parameters(), lean.parameters(), 1.0)
            th.testing.assert_close(lean(batch), averaged(batch), rtol=0, atol=0)
            polyak_update(kept.parameters(), lean.parameters(), 1.0)
        th.testing.assert_close(lean(batch), before, rtol=0, atol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_made_within_a_rollout_reads_its_own_weights(copied):
    """Such as a target network, which SB3's ``polyak_update`` writes to through ``.data``."""
    extractor = LeanNatureCNN(spaces.Box(0, 255, (4, 84, 84), np.uint8), dtype="bfloat16")
    obs = images(2)
    with th.no_grad(), extractor.constant_weights():
        extractor(obs)
        copy_of_it = copied(extractor)
        before = copy_of_it(obs)
        for parameter in copy_of_it.parameters():
            parameter.data.mul_(0.5)
        assert (copy_of_it(obs) - before).norm() > 0.1 * before.norm()


@pytest.mark.slow
def test_a_compiled_policy_is_one_graph_in_every_step_of_a_rollout():
    """``fullgraph`` and the limit of one make an error of a break, and of a second compilation."""
    # Forgets what other tests compiled
    th._dynamo.reset()
    parameters = []
    for compiled in (False, True):
        model = QPPO("MlpPolicy", make_vec_env("CartPole-v1", 2), n_steps=16, batch_size=16, seed=0, device="cpu")
        if compiled:
            model.policy.compile(backend="eager", fullgraph=True)
        with th._dynamo.config.patch(recompile_limit=1):
            model.learn(64)
        parameters.append(list(model.policy.parameters()))
    assert all(map(th.equal, *parameters))


# Not with Inductor, PyTorch's default, which rounds differently and takes many seconds
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_training_with_the_network_compiled_as_one_graph_is_identical(dtype, tmp_path):
    policies = []
    for compiled in (False, True):
        env = FakeImageEnv(screen_height=84, screen_width=84, n_channels=4, channel_first=True)
        env.observation_space.seed(0)
        extractor_kwargs = dict(dtype=dtype, layer_norm="linear")
        policy_kwargs = dict(features_extractor_class=LeanNatureCNN, features_extractor_kwargs=extractor_kwargs)
        model = QPPO("CnnPolicy", env, n_steps=8, batch_size=4, policy_kwargs=policy_kwargs, device="cpu", seed=0)
        if compiled:
            model.policy.features_extractor.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        model.learn(16)
        policies.append(model.policy)
    # What is compiled cannot be pickled, and is left out
    policies.append(pickle.loads(pickle.dumps(model.policy)))
    model.save(tmp_path / "model")
    policies.append(QPPO.load(tmp_path / "model", device="cpu").policy)

    expected, *others = (list(policy.parameters()) for policy in policies)
    for parameters in others:
        assert all(map(th.equal, parameters, expected))


def test_rollouts_of_qa2c_prepare_the_weights_once():
    env = FakeImageEnv(action_dim=6, screen_height=84, screen_width=84, n_channels=4, channel_first=True)
    model = QA2C("CnnPolicy", env, policy_kwargs=dict(features_extractor_class=LeanNatureCNN))
    made, convert = [], LeanNatureCNN._convert

    def counted(self, parameters):
        made.append(th.is_grad_enabled())
        return convert(self, parameters)

    model.policy.features_extractor._convert = counted.__get__(model.policy.features_extractor)
    model.learn(15)
    # Three rollouts and their updates
    assert made == [False, True] * 3


@pytest.mark.parametrize("layer_norm", ["linear", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_are_normalised_before_their_relu(layer_norm, dtype):
    lean, batch = make(LeanNatureCNN, layer_norm=layer_norm, dtype=dtype), images(2)
    hidden = batch.float() / 255
    for layer in lean.cnn:
        hidden = layer(hidden)
        if isinstance(layer, th.nn.Conv2d) and layer_norm == "all":
            hidden = th.nn.functional.layer_norm(hidden, hidden.shape[1:])
    expected = th.relu(th.nn.functional.layer_norm(lean.linear[0](hidden), (512,)))
    tolerance = 1e-4 if dtype == "float32" else 5e-2
    assert (lean(batch) - expected).norm() < tolerance * expected.norm()
    # All of them learn
    lean(batch).sum().backward()
    assert all(parameter.grad is not None for parameter in lean.parameters())
    n_norms = 2 * (512 + (32 + 64 + 64) * (layer_norm == "all"))
    assert sum(p.numel() for p in lean.parameters()) - sum(p.numel() for p in make(NatureCNN).parameters()) == n_norms


def test_an_unknown_place_for_layer_normalisation_is_refused():
    with pytest.raises(ValueError, match="`layer_norm` must be False or True, but 'linear' was given"):
        SharedMlp(spaces.Box(0, 1, (4,)), layer_norm="linear")
    for network in (LeanNatureCNN, MinAtarCNN):
        with pytest.raises(ValueError, match="`layer_norm` must be None, 'linear' or 'all', but True was given"):
            make(network, layer_norm=True)


def fill(buffer, update):
    """One rollout of 5 steps in 4 environments, the same whoever asks."""
    rng = np.random.default_rng(update)
    buffer.reset()
    for _ in range(5):
        buffer.add(
            rng.integers(0, 256, (4, 4, 84, 84), dtype=np.uint8),
            rng.integers(6, size=(4, 1)),
            rng.integers(-1, 2, size=4).astype(np.float32),
            rng.random(4) < 0.1,
            th.zeros(4, 1),
            th.zeros(4),
        )
    buffer.compute_returns_and_advantage(th.as_tensor(rng.normal(size=(4, 1)).astype(np.float32)), np.zeros(4, dtype=bool))


def train(n_updates, **policy_kwargs):
    """:return: parameters after updates on given rollouts, and how far they are from where they began"""
    env = FakeImageEnv(action_dim=6, screen_height=84, screen_width=84, n_channels=4, channel_first=True)
    model = QA2C("CnnPolicy", env, n_steps=5, seed=0, policy_kwargs=policy_kwargs)
    model.rollout_buffer = MaskableRolloutBuffer(5, model.observation_space, model.action_space, n_envs=4)
    model._setup_learn(1000)
    start = th.nn.utils.parameters_to_vector(model.policy.parameters()).detach().clone()
    np.random.seed(0)
    for update in range(n_updates):
        fill(model.rollout_buffer, update)
        model.train()
    end = th.nn.utils.parameters_to_vector(model.policy.parameters()).detach()
    return end, (end - start).norm()


def test_lean_updates_are_the_plain_ones():
    """In float32 the parameters end within a thousandth of the way that they went."""
    plain, way = train(10)
    lean, _ = train(10, features_extractor_class=LeanNatureCNN)
    assert (lean - plain).norm() < 1e-3 * way


def test_gradients_are_those_of_nature_cnn():
    plain, lean = make(NatureCNN), make(LeanNatureCNN)
    plain(images(8).float() / 255).square().sum().backward()
    lean(images(8)).square().sum().backward()
    for (name, expected), actual in zip(plain.named_parameters(), lean.parameters(), strict=True):
        assert actual.grad.shape == expected.grad.shape
        assert (actual.grad - expected.grad).norm() < 1e-4 * expected.grad.norm(), name


@pytest.mark.parametrize("share_features_extractor", [True, False])
def test_policies_take_it_save_it_and_predict_the_same(share_features_extractor, tmp_path):
    env = FakeImageEnv(action_dim=6, screen_height=84, screen_width=84, n_channels=4, channel_first=True)
    kwargs = dict(features_extractor_class=LeanNatureCNN, share_features_extractor=share_features_extractor)
    model = QA2C(
        "CnnPolicy", env, seed=0, policy_kwargs={**kwargs, "features_extractor_kwargs": dict(dtype="bfloat16")}
    ).learn(10)
    model.save(tmp_path / "model")
    loaded = QA2C.load(tmp_path / "model")
    assert loaded.policy.features_extractor.dtype == th.bfloat16
    obs = images(3)
    with th.no_grad():
        th.testing.assert_close(loaded.policy.predict_values(obs), model.policy.predict_values(obs), rtol=0, atol=0)
        direct, by_predict = (
            p.distribution.probs for p in (model.policy._actor_critic(obs)[0], model.policy.get_distribution(obs))
        )
        th.testing.assert_close(direct, by_predict, rtol=0, atol=0)


def test_images_that_are_not_to_be_normalised_are_not_in_rollouts_either():
    env = FakeImageEnv(action_dim=6, screen_height=84, screen_width=84, n_channels=4, channel_first=True)
    model = QA2C("CnnPolicy", env, policy_kwargs=dict(features_extractor_class=LeanNatureCNN, normalize_images=False))
    obs = images(3)
    with th.no_grad():
        in_rollouts, by_predict = model.policy.evaluate_all_actions(obs)[1], model.policy.get_distribution(obs)
    th.testing.assert_close(in_rollouts, by_predict.distribution.logits, rtol=0, atol=1e-5)


def test_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="'float32' or 'bfloat16', but 'float16'"):
        make(LeanNatureCNN, dtype="float16")


def test_minatars_network_sees_grids_with_channels_last():
    space = spaces.Box(0, 1, (10, 10, 4), dtype=bool)
    network = MinAtarCNN(space)
    assert network(th.zeros(3, 10, 10, 4)).shape == (3, 128)
    # 16 3x3 convolutions of 4 channels, then 128 units of 16 x 8 x 8, each with biases
    assert sum(p.numel() for p in network.parameters()) == 16 * (4 * 9 + 1) + 128 * (16 * 8 * 8 + 1)
    # A convolution at the corner sees the corner
    network.cnn[0].weight.data.fill_(1.0)
    network.cnn[0].bias.data.zero_()
    grid = th.zeros(1, 10, 10, 4)
    grid[0, 0, 0, 2] = 1
    features = network.cnn(grid.permute(0, 3, 1, 2)).reshape(16, 8, 8)
    assert features[:, 0, 0].tolist() == [1.0] * 16 and features.sum() == 16


@pytest.mark.parametrize("layer_norm", [None, "linear", "all"])
def test_minatars_network_normalises_its_layers_before_their_relu(layer_norm):
    network = MinAtarCNN(spaces.Box(0, 1, (10, 10, 4), dtype=bool), layer_norm=layer_norm)
    grids = (th.rand(3, 10, 10, 4) < 0.1).float()
    hidden = network.cnn[0](grids.permute(0, 3, 1, 2))
    if layer_norm == "all":
        hidden = th.nn.functional.layer_norm(hidden, hidden.shape[1:])
    hidden = network.linear[0](th.relu(hidden).flatten(1))
    if layer_norm:
        hidden = th.nn.functional.layer_norm(hidden, (128,))
    th.testing.assert_close(network(grids), th.relu(hidden))


def test_images_are_refused_by_minatars_network():
    """SB3 would move the channels of the first one to the front, and takes the second one as it is."""
    policy_kwargs = dict(features_extractor_class=MinAtarCNN)
    last, first = (FakeImageEnv(screen_height=10, screen_width=10, n_channels=4, channel_first=c) for c in (False, True))
    for env in (last, first):
        with pytest.raises(ValueError, match=r"grids of shape \(height, width, channels\), but Box.*uint8.*DtypeObservation"):
            QA2C("MlpPolicy", env, policy_kwargs=policy_kwargs)
    model = QA2C("MlpPolicy", DtypeObservation(last, np.float32), policy_kwargs=policy_kwargs)
    assert model.policy.features_extractor.cnn[0].in_channels == 4


@pytest.mark.parametrize("layer_norm", [None, "linear", "all"])
def test_minatars_network_has_one_memory_layout_in_both_directions(layer_norm):
    network = MinAtarCNN(spaces.Box(0, 1, (10, 10, 4), dtype=bool), layer_norm=layer_norm)
    outputs = []
    for layer in network.cnn[:-1]:
        layer.register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    features = network((th.rand(3, 10, 10, 4) < 0.1).float())
    for output in outputs:
        output.retain_grad()
    features.sum().backward()
    assert len(outputs) == len(network.cnn) - 1
    assert all(output.is_contiguous() and output.grad.is_contiguous() for output in outputs)


@pytest.mark.parametrize("name", ["n_layers", "features_dim"])
def test_a_shared_body_without_layers_or_units_is_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` must be an integer, at least 1, but 0 was given"):
        SharedMlp(spaces.Box(0, 1, (4,)), **{name: 0})


@pytest.mark.parametrize("algorithm", [QA2C, A2C])
def test_a_shared_body_leaves_only_the_heads_apart(algorithm):
    kwargs = dict(features_extractor_class=SharedMlp, features_extractor_kwargs=dict(features_dim=8), net_arch=[])
    model = algorithm("MlpPolicy", "CartPole-v1", policy_kwargs=kwargs, device="cpu").learn(50)
    n_values = 2 if algorithm is QA2C else 1
    shared = (4 * 8 + 8) + (8 * 8 + 8)
    unique = {id(p): p.numel() for p in model.policy.parameters()}
    assert sum(unique.values()) == shared + (8 * 2 + 2) + (8 * n_values + n_values)
