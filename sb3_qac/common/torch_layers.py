from typing import Literal, cast

import gymnasium as gym
import torch as th
from stable_baselines3.common.torch_layers import NatureCNN
from torch import nn
from torch.nn import functional as F


class LeanNatureCNN(NatureCNN):
    """
    The Nature CNN, computed faster: the same layers, parameters and initial weights as SB3's ``NatureCNN``.

    Images are kept channels last, in which convolutions are faster, and are taken as they come: the division by 255
    happens in the weights of the first layer, which are far fewer. In "float32" only the rounding differs from ``NatureCNN``.
    "bfloat16" computes the layers with 8 significant bits and changes results beyond rounding; parameters, their
    gradients, the features given back and all that follows stay in float32.

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
        self.dtype = getattr(th, dtype)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """
        :param observations: Images, (batch_size, channels, height, width): uint8, or floats that are normalised already
        :return: Features, shape (batch_size, features_dim), float32
        """
        first = cast(nn.Conv2d, self.cnn[0])
        weight = first.weight / 255 if observations.dtype == th.uint8 else first.weight
        images = observations.to(self.dtype, memory_format=th.channels_last)
        with th.autocast(images.device.type, dtype=self.dtype, enabled=self.dtype != th.float32):
            hidden = F.conv2d(images, weight, first.bias, first.stride)
            return self.linear(self.cnn[1:](hidden)).float()
