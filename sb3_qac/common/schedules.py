"""Arguments that may change during training."""

import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import FloatSchedule, LinearSchedule

from sb3_qac.common.checks import check_choice, check_number
from sb3_qac.common.torch_layers import SMALLEST_IMAGE

SelfAlgorithm = TypeVar("SelfAlgorithm", bound="ScheduledOnPolicyAlgorithm")


def check_schedule(name: str, value: float | str | Schedule) -> FloatSchedule:
    """
    :param name: Name of the parameter, for the message
    :param value: A number, a function of the progress remaining (from 1 to 0), or "lin_" and a number, which is RL Zoo's name
        of the schedule that falls linearly from that number to 0
    :return: the schedule
    :raises ValueError: if it is none of these, or the number is not finite or is negative
    """
    if callable(value) and not isinstance(value, type):
        return FloatSchedule(value)
    if not isinstance(value, str):
        check_number(name, value)
        return FloatSchedule(float(value))  # type: ignore[arg-type]
    kind, _, start = value.partition("_")
    try:
        check_number(name, float(start))
    except ValueError:
        kind = ""
    if kind != "lin":
        raise ValueError(
            f"`{name}` must be a number, at least 0, a function of the progress remaining, or 'lin_' and the number to start "
            f"from, such as 'lin_0.03', but {value!r} was given."
        )
    return FloatSchedule(LinearSchedule(float(start), 0.0, 1.0))


def current_value(name: str, value: float | str | Schedule, progress_remaining: float) -> float:
    """
    :param name: Name of the parameter, for the message
    :param value: Anything that ``check_schedule`` takes
    :param progress_remaining: From 1 to 0
    :return: the value of the schedule
    :raises ValueError: if it is not finite or is negative
    """
    current = check_schedule(name, value)(progress_remaining)
    check_number(name, current)
    return current


@contextmanager
def explain_nan() -> Iterator[None]:
    """
    :raises ValueError: in place of PyTorch's error for a distribution whose parameters are NaN, with what to do
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        # The second one where a compiled policy has switched PyTorch's checks of distributions off
        checked = "Expected parameter" in str(error) and "found invalid values" in str(error)
        if not checked and "probability tensor contains" not in str(error):
            raise
        raise ValueError(
            "The policy's distribution has NaN among its parameters. Most often an observation was NaN or infinite: to see "
            "whether the environment sends that, wrap it with `VecCheckNan(env, raise_exception=True)` of "
            "`stable_baselines3.common.vec_env`."
        ) from error


class ScheduledOnPolicyAlgorithm(OnPolicyAlgorithm):
    """
    SB3's ``OnPolicyAlgorithm``, whose learning rate may be anything that ``check_schedule`` takes, but neither negative nor
    NaN, and whose progress remaining never falls below 0. So may the entropy coefficient of an algorithm that takes it from
    ``_current_ent_coef``. Unknown policy names raise an error that lists the valid ones, and PyTorch's errors for
    images that are too small and for NaN say what to do.
    """

    # None if it is a schedule
    _ent_coef_at_start: float | None

    @property
    def training_state(self) -> tuple[str, ...]:
        """Attributes that change during training, for exact resume: SB3's users set ``ent_coef`` in callbacks."""
        is_set = isinstance(self.ent_coef, numbers.Real) and self.ent_coef != self._ent_coef_at_start
        return ("ent_coef",) if is_set else ()

    def _setup_model(self) -> None:
        # A number stays a number, because SB3's users read it too
        if not isinstance(self.ent_coef, numbers.Real):
            self.ent_coef = check_schedule("ent_coef", self.ent_coef)  # type: ignore[assignment]
        self._ent_coef_at_start = self.ent_coef if isinstance(self.ent_coef, numbers.Real) else None
        try:
            super()._setup_model()
        except RuntimeError as error:
            if "Kernel size can't be greater than actual input size" not in str(error):
                raise
            raise ValueError(
                f"The images of {self.observation_space} are too small for the kernels of the features extractor. NatureCNN, "
                f"the default of 'CnnPolicy' and 'MultiInputPolicy', takes images of at least {SMALLEST_IMAGE} x "
                f"{SMALLEST_IMAGE}. Enlarge them, for "
                "instance with `gymnasium.wrappers.ResizeObservation(env, (84, 84))`, or give another "
                "`features_extractor_class` in `policy_kwargs`, or 'MlpPolicy', which flattens images."
            ) from error

    def learn(self: SelfAlgorithm, *args: Any, **kwargs: Any) -> SelfAlgorithm:
        with explain_nan():
            return super().learn(*args, **kwargs)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        with explain_nan():
            return super().predict(observation, state, episode_start, deterministic)

    def _get_policy_from_name(self, policy_name: str) -> type[BasePolicy]:
        check_choice("policy", policy_name, list(self.policy_aliases))
        return super()._get_policy_from_name(policy_name)

    def _setup_lr_schedule(self) -> None:
        self.lr_schedule = check_schedule("learning_rate", self.learning_rate)

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        super()._update_current_progress_remaining(num_timesteps, total_timesteps)
        # The last rollout may exceed the planned steps, and schedules are functions of 1 to 0
        self._current_progress_remaining = max(self._current_progress_remaining, 0.0)

    def _update_learning_rate(self, optimizers: list[th.optim.Optimizer] | th.optim.Optimizer) -> None:
        current_value("learning_rate", self.lr_schedule, self._current_progress_remaining)
        super()._update_learning_rate(optimizers)

    def _current_ent_coef(self) -> float:
        """:return: the entropy coefficient of this update"""
        if not isinstance(self.ent_coef, numbers.Real):
            # A callback may have set another one, which exact resume can compare only as a schedule of SB3
            self.ent_coef = check_schedule("ent_coef", self.ent_coef)  # type: ignore[assignment]
        return current_value("ent_coef", self.ent_coef, self._current_progress_remaining)
