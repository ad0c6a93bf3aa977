from typing import Literal

import gymnasium as gym
import torch as th
from stable_baselines3.common.preprocessing import get_flattened_obs_dim
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, NatureCNN, create_mlp
from torch import nn
from torch.nn import functional as F

from sb3_qac.common.memory import keep_freed_memory


class LeanNatureCNN(NatureCNN):
    """
    The Nature CNN, computed faster: the same layers, parameters and initial weights as SB3's ``NatureCNN``.

    Images are taken as they come, the division by 255 happens in the weights of the first layer, which are far fewer; they
    are kept channels last, in which convolutions are faster; and what has to be made of the weights is made once per
    update, not at each step of a rollout. In "float32" only the rounding differs from ``NatureCNN``. "bfloat16" computes
    the layers with 8 significant bits and changes results beyond rounding; parameters, their gradients, the features
    given back and all that follows stay in float32.

    With A2C or PPO, give ``net_arch=[]`` too: SB3 leaves out the hidden layers behind ``NatureCNN`` only, not behind this one.

    Where the C library is glibc, making one also has the process keep freed memory (see ``keep_freed_memory``).

    :param observation_space: Observation space, images with channels first
    :param features_dim: Number of features
    :param normalized_image: Whether images are normalised already (see ``NatureCNN``)
    :param dtype: Precision of the layers, "float32" or "bfloat16"
    :raises ValueError: for another precision
    """

    def __init__(
        self,
        observation_space: gym.Space,
        features_dim: int = 512,
        normalized_image: bool = False,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"`dtype` must be 'float32' or 'bfloat16', but {dtype!r} was given.")
        super().__init__(observation_space, features_dim, normalized_image)
        keep_freed_memory()
        self.dtype: th.dtype = getattr(th, dtype)
        self.convolutions = [layer for layer in self.cnn if isinstance(layer, nn.Conv2d)]
        # Weights as the layers take them, by whether images are pixels, and what they were made of: where the parameters
        # lay, and how often they had been written to
        self._weights: dict[bool, tuple[list[tuple[int, int]], list[th.Tensor]]] = {}

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """
        :param observations: Images, (batch_size, channels, height, width): uint8, or floats that are normalised already
        :return: Features, shape (batch_size, features_dim), float32
        """
        weights = iter(self._layer_weights(pixels=observations.dtype == th.uint8))
        hidden = observations.to(self.dtype).contiguous(memory_format=th.channels_last)
        for convolution in self.convolutions:
            hidden = F.relu_(F.conv2d(hidden, next(weights), next(weights), convolution.stride))
        return F.relu_(F.linear(hidden.flatten(1), next(weights), next(weights))).float()

    def _layer_weights(self, pixels: bool) -> list[th.Tensor]:
        """
        :param pixels: Whether images are between 0 and 255
        :return: Weight and bias of each layer in its precision, with the division by 255 in the first weight
        """
        parameters = list(self.parameters())
        versions = [(parameter.data_ptr(), parameter._version) for parameter in parameters]
        if not th.is_grad_enabled() and pixels in self._weights and self._weights[pixels][0] == versions:
            return self._weights[pixels][1]
        weights = [parameter.to(self.dtype) for parameter in parameters]
        if pixels:
            weights[0] = (parameters[0] / 255).to(self.dtype)
        if not th.is_grad_enabled():
            self._weights[pixels] = versions, weights
        return weights


class MinAtarCNN(BaseFeaturesExtractor):
    """
    The network of the MinAtar paper, for its 10 x 10 grids: 16 3x3 convolutions, then a linear layer, both with ReLU.

    Paper: MinAtar, Young and Tian 2019, https://arxiv.org/abs/1903.03176

    :param observation_space: Observation space, grids with channels last, shape (height, width, channels), at least 3 x 3
    :param features_dim: Number of features
    """

    def __init__(self, observation_space: gym.spaces.Box, features_dim: int = 128) -> None:
        super().__init__(observation_space, features_dim)
        height, width, n_channels = observation_space.shape
        self.cnn = nn.Sequential(nn.Conv2d(n_channels, 16, kernel_size=3), nn.ReLU(), nn.Flatten())
        self.linear = nn.Sequential(nn.Linear(16 * (height - 2) * (width - 2), features_dim), nn.ReLU())

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """
        :param observations: Grids, shape (batch_size, height, width, channels)
        :return: Features, shape (batch_size, features_dim)
        """
        return self.linear(self.cnn(observations.permute(0, 3, 1, 2)))


class SharedMlp(BaseFeaturesExtractor):
    """
    Layers that the actor and the critic of an ``MlpPolicy`` share, which SB3's ``net_arch`` keeps apart. With
    ``policy_kwargs=dict(features_extractor_class=SharedMlp, net_arch=[])`` only the two heads are separate.

    :param observation_space: Observation space
    :param features_dim: Number of units of each layer
    :param n_layers: Number of layers
    """

    def __init__(self, observation_space: gym.Space, features_dim: int = 128, n_layers: int = 2) -> None:
        super().__init__(observation_space, features_dim)
        n_inputs = get_flattened_obs_dim(observation_space)
        self.mlp = nn.Sequential(nn.Flatten(), *create_mlp(n_inputs, -1, [features_dim] * n_layers, nn.Tanh))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """
        :param observations: Observations, shape (batch_size, ...)
        :return: Features, shape (batch_size, features_dim)
        """
        return self.mlp(observations)
