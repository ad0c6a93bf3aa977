import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import gymnasium as gym
import torch as th
from stable_baselines3.common.preprocessing import get_flattened_obs_dim, is_image_space
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, NatureCNN, create_mlp
from torch import nn
from torch.nn import functional as F

from sb3_qac.common.checks import check_choice, check_integer

# Pixels of the smallest side that the convolutions of SB3's NatureCNN can be applied to
SMALLEST_IMAGE = 36


class LeanNatureCNN(NatureCNN):
    """
    The Nature CNN, computed faster: the same layers, parameters and initial weights as SB3's ``NatureCNN``.

    SB3's policies, which REINFORCE has too, have no hidden layers behind ``NatureCNN``, but two behind any other class. So
    give them ``net_arch=[]`` with this one. The policies of QA2C, QPPO and PQN have none behind it either by default.

    The layers see pixels. The weights of the first layer are divided by 255 instead of the pixels, as there are far fewer of
    them. Images are kept channels last, which makes convolutions faster, and in bfloat16 the first layer sees blocks
    of pixels (see ``convolve``). A policy may pass the pixels as they are (see
    ``takes_pixels``). Images that SB3 has divided by 255 are multiplied back, which gives exactly the same pixels, so both
    ways give the same features. In "float32" only the rounding differs from ``NatureCNN``. "bfloat16" computes the layers with
    8 significant bits and changes results beyond rounding. Parameters, their gradients, the returned features and everything
    behind them stay in float32. A convolution in ``cnn`` and the linear layer may be replaced by others of their kind with
    a bias; the activation function is always ReLU. Forward hooks of the layers are not called.

    :param observation_space: Observation space, images with channels first
    :param features_dim: Number of features
    :param normalized_image: Whether images are already normalized (see ``NatureCNN``); they are then used as they are
    :param dtype: Precision of the layers, "float32" or "bfloat16"
    :param layer_norm: Where to normalize before the ReLU, over all units of a layer: None for nowhere as in ``NatureCNN``,
        "linear" for the last layer, "all" for each layer (PQN, Gallici et al. 2024, https://arxiv.org/abs/2407.04811)
    :raises ValueError: for another precision, or another place for layer normalization
    """

    def __init__(
        self,
        observation_space: gym.Space,
        features_dim: int = 512,
        normalized_image: bool = False,
        dtype: Literal["float32", "bfloat16"] = "float32",
        layer_norm: Literal["linear", "all"] | None = None,
    ) -> None:
        check_choice("dtype", dtype, ("float32", "bfloat16"))
        check_choice("layer_norm", layer_norm, (None, "linear", "all"))
        super().__init__(observation_space, features_dim, normalized_image)
        self.normalized_image = normalized_image
        # Whether ``forward`` takes uint8 images too, so that a policy need not make floats of them
        self.takes_pixels = not normalized_image
        self.dtype: th.dtype = getattr(th, dtype)
        if layer_norm is not None:
            # One group is the whole layer: mean and variance are over channels and positions
            self.linear_norm = nn.GroupNorm(1, features_dim)
        if layer_norm == "all":
            self.cnn_norms = nn.ModuleList(
                nn.GroupNorm(1, layer.out_channels) for layer in self.cnn if isinstance(layer, nn.Conv2d)
            )
        # While ``constant_weights`` is active: the prepared weights, once they are made
        self._keeps_weights = False
        self._kept: list[th.Tensor] | None = None

    @property
    def _layers(self) -> list[tuple[Any, Any]]:
        """Layers in the order of the forward pass, each with its normalization. Read anew, because a user may replace one."""
        convolutions = [layer for layer in self.cnn if isinstance(layer, nn.Conv2d)]
        norms = getattr(self, "cnn_norms", [None] * len(convolutions))
        return [*zip(convolutions, norms, strict=True), (self.linear[0], getattr(self, "linear_norm", None))]

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """
        :param observations: Images, (batch_size, channels, height, width): uint8, or floats that are already normalized
        :return: Features, shape (batch_size, features_dim), float32
        """
        if not self.normalized_image and observations.dtype != th.uint8:
            # For each of the 256 values, (pixel / 255) * 255 is the pixel in float32
            observations = observations * 255
        weights = iter(self._layer_weights())
        hidden = observations.to(self.dtype)
        for layer, norm in self._layers:
            if isinstance(layer, nn.Conv2d):
                hidden = convolve(layer, hidden, next(weights), next(weights))
            else:
                hidden = F.linear(hidden.flatten(1), next(weights), next(weights))
            if norm is not None:
                hidden = F.group_norm(hidden, 1, next(weights), next(weights))
            hidden = F.relu_(hidden)
        return hidden.float()

    def _layer_weights(self) -> list[th.Tensor]:
        """
        :return: Parameters in the order of the forward pass and in the precision of the layers, with the division by 255 in
            the first
        """
        modules = [module for module in itertools.chain(*self._layers) if module is not None]
        parameters = [parameter for module in modules for parameter in (module.weight, module.bias)]
        # Compiled code would keep those of its first call
        if th.compiler.is_compiling() or th.is_grad_enabled() or not self._keeps_weights:
            return self._convert(parameters)
        if self._kept is None:
            self._kept = self._convert(parameters)
        return self._kept

    def _convert(self, parameters: list[th.Tensor]) -> list[th.Tensor]:
        weights = [parameter.to(self.dtype) for parameter in parameters]
        if not self.normalized_image:
            weights[0] = (parameters[0] / 255).to(self.dtype)
        return weights

    def __getstate__(self) -> dict[str, Any]:
        # The promise holds for this object only, not for copies of it
        return {**super().__getstate__(), "_keeps_weights": False, "_kept": None}

    @contextmanager
    def constant_weights(self) -> Iterator[None]:
        """Context manager: while active, the weights are prepared once (see the function of this name)."""
        outermost, self._keeps_weights, self._kept = not self._keeps_weights, True, None
        try:
            yield
        finally:
            self._kept = None
            if outermost:
                self._keeps_weights = False


def convolve(layer: nn.Conv2d, images: th.Tensor, weight: th.Tensor, bias: th.Tensor) -> th.Tensor:
    """
    A convolution. The first one of the Nature CNN, 8 x 8 pixels with a stride of 4, is computed in bfloat16 as one of 2 x 2
    blocks of 4 x 4 pixels with a stride of 1: the same sums, but more than the few channels that the processor would pad. This
    saves a sixth of the network's time in updates with minibatches of 128.

    :param layer: Layer
    :param images: Its input, shape (batch_size, channels, height, width)
    :param weight: Weights to use, shape (out_channels, channels, kernel_height, kernel_width)
    :param bias: Bias to use, shape (out_channels,)
    :return: its output, with channels last
    """
    is_first_of_nature_cnn = (layer.kernel_size, layer.stride, layer.padding) == ((8, 8), (4, 4), (0, 0))
    has_defaults = (layer.dilation, layer.groups) == ((1, 1), 1)
    # On a GPU this was not measured
    is_faster = is_first_of_nature_cnn and has_defaults and images.dtype == th.bfloat16 and images.device.type == "cpu"
    if is_faster and can_be_blocks(images):
        return F.conv2d(pixel_blocks(images), F.pixel_unshuffle(weight, 4), bias)
    return layer._conv_forward(images.contiguous(memory_format=th.channels_last), weight, bias)


def can_be_blocks(images: th.Tensor) -> bool:
    """
    :param images: Input of a network
    :return: whether ``pixel_blocks`` can be used, which gradients do not pass and exported networks cannot have
    """
    if th.jit.is_tracing() or th.compiler.is_exporting() or images.requires_grad:
        return False
    return images.is_contiguous() and len(images) > 0 and images.shape[2] % 4 == images.shape[3] % 4 == 0


def pixel_blocks(images: th.Tensor) -> th.Tensor:
    """
    ``F.pixel_unshuffle(images, 4)``, but faster: four pixels of a row are moved as one number.

    :param images: Images in bfloat16 without gradients, shape (batch_size, channels, height, width), sides divisible by 4
    :return: blocks of 4 x 4 pixels, shape (batch_size, 16 * channels, height / 4, width / 4), with channels last
    """
    batch_size, channels, height, width = images.shape
    rows = images.reshape(-1).view(th.int64).view(batch_size, channels, height // 4, 4, width // 4)
    blocks = rows.permute(0, 2, 4, 1, 3).contiguous().view(images.dtype)
    return blocks.view(batch_size, height // 4, width // 4, 16 * channels).permute(0, 3, 1, 2)


def default_net_arch(net_arch: Any, features_extractor_class: Any) -> Any:
    """
    :param net_arch: ``net_arch`` of an actor-critic policy, or None
    :param features_extractor_class: Features extractor of the policy
    :return: ``net_arch`` for SB3's policy: where it is None, no hidden layers behind ``LeanNatureCNN``, as SB3 has none behind
        ``NatureCNN``
    """
    return [] if net_arch is None and features_extractor_class is LeanNatureCNN else net_arch


@contextmanager
def constant_weights(policy: nn.Module) -> Iterator[None]:
    """
    Context manager: while active, every ``LeanNatureCNN`` prepares its weights once instead of at each call, as in the
    rollouts of QA2C, QPPO and PQN. The caller promises that they do not change.

    In bfloat16 this saves the conversion of 1.7 million weights at each step. A callback that changes weights within a rollout
    must say so: it does it within ``with constant_weights(policy)``, at whose start and end the weights are read anew. For
    instance, it writes averaged weights, evaluates them, and writes the others back.

    :param policy: Policy, or any other module
    """
    with ExitStack() as stack:
        for module in policy.modules():
            if isinstance(module, LeanNatureCNN):
                stack.enter_context(module.constant_weights())
        yield


class MinAtarCNN(BaseFeaturesExtractor):
    """
    The network of the MinAtar paper, for its 10 x 10 grids: 16 3x3 convolutions, then a linear layer, both with ReLU.

    Paper: MinAtar, Young and Tian 2019, https://arxiv.org/abs/1903.03176

    :param observation_space: Observation space, grids with channels last, shape (height, width, channels), at least 3 x 3. Not
        images (uint8 from 0 to 255), whose channels SB3 moves to the front
    :param features_dim: Number of features
    :param layer_norm: Where to normalize before the ReLU, over all units of a layer: None for nowhere, "linear" for the
        linear layer, "all" for both (PQN, Gallici et al. 2024, https://arxiv.org/abs/2407.04811)
    :raises ValueError: for another place for layer normalization, for images, or for other than three dimensions
    """

    def __init__(
        self,
        observation_space: gym.spaces.Box,
        features_dim: int = 128,
        layer_norm: Literal["linear", "all"] | None = None,
    ) -> None:
        check_choice("layer_norm", layer_norm, (None, "linear", "all"))
        if is_image_space(observation_space) or len(observation_space.shape) != 3:
            raise ValueError(
                f"`MinAtarCNN` takes grids of shape (height, width, channels), but {observation_space} was given. If it is an "
                "image, whose channels SB3 moves to the front, make it bool or float32, for instance with "
                "`gymnasium.wrappers.DtypeObservation`."
            )
        super().__init__(observation_space, features_dim)
        height, width, n_channels = observation_space.shape

        cnn_norm = [nn.GroupNorm(1, 16)] if layer_norm == "all" else []
        linear_norm = [nn.LayerNorm(features_dim)] if layer_norm else []
        self.cnn = nn.Sequential(nn.Conv2d(n_channels, 16, kernel_size=3), *cnn_norm, nn.ReLU(), nn.Flatten())
        n_flatten = 16 * (height - 2) * (width - 2)
        self.linear = nn.Sequential(nn.Linear(n_flatten, features_dim), *linear_norm, nn.ReLU())

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """
        :param observations: Grids, shape (batch_size, height, width, channels)
        :return: Features, shape (batch_size, features_dim)
        """
        # Contiguous, as the gradient that comes back through the flattening is. With two memory layouts, ReLU's gradient alone
        # takes a quarter of the network's time.
        return self.linear(self.cnn(observations.permute(0, 3, 1, 2).contiguous()))


class DuelingHead(nn.Module):
    """
    Dueling head of an action-value critic: ``Q(s, a) = V(s) + A(s, a) - mean_a' A(s, a')``.

    What is learned from the action taken moves the values of all other actions of that state too. With one output per action,
    each output learns from its own action only, which is slow for actions that are rarely taken.

    Paper: Dueling Network Architectures, Wang et al. 2016, equation 9, https://arxiv.org/abs/1511.06581

    :param in_features: Number of features
    :param n_actions: Number of actions
    """

    def __init__(self, in_features: int, n_actions: int) -> None:
        super().__init__()
        self.value_net = nn.Linear(in_features, 1)
        self.advantage_net = nn.Linear(in_features, n_actions)

    def forward(self, features: th.Tensor) -> th.Tensor:
        """
        :param features: Features, shape (batch_size, in_features)
        :return: ``Q(s, a)``, shape (batch_size, n_actions)
        """
        advantages = self.advantage_net(features)
        return self.value_net(features) + advantages - advantages.mean(dim=1, keepdim=True)


class SharedMlp(BaseFeaturesExtractor):
    """
    Layers that the actor and the critic of an ``MlpPolicy`` share, which SB3's ``net_arch`` keeps apart. With
    ``policy_kwargs=dict(features_extractor_class=SharedMlp, net_arch=[])`` only the two heads are separate.

    :param observation_space: Observation space, not a Dict
    :param features_dim: Number of units of each layer
    :param n_layers: Number of layers
    :param layer_norm: Whether to normalize each layer before its activation function
    :raises ValueError: for a number below 1, or if ``layer_norm`` is neither True nor False
    """

    def __init__(
        self, observation_space: gym.Space, features_dim: int = 128, n_layers: int = 2, layer_norm: bool = False
    ) -> None:
        check_integer("features_dim", features_dim, minimum=1)
        check_integer("n_layers", n_layers, minimum=1)
        check_choice("layer_norm", layer_norm, (False, True))
        super().__init__(observation_space, features_dim)
        n_inputs = get_flattened_obs_dim(observation_space)
        norms: list[type[nn.Module]] = [nn.LayerNorm] if layer_norm else []
        layers = create_mlp(n_inputs, -1, [features_dim] * n_layers, nn.Tanh, post_linear_modules=norms)
        self.mlp = nn.Sequential(nn.Flatten(), *layers)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """
        :param observations: Observations, shape (batch_size, ...)
        :return: Features, shape (batch_size, features_dim)
        """
        return self.mlp(observations)
