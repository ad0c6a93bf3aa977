"""What a study can run by name: the rungs of the ladder, the tasks among them, and whole studies."""

from dataclasses import dataclass, field
from typing import Any

from sb3_qac.common.minatar import MINATAR_GAMES


@dataclass(frozen=True)
class Rung:
    """
    One algorithm of the ladder.

    :param formula: What the actor maximises, the mean over steps
    :param change: What it changes of the rung below
    :param algo: Algorithm, by its name in RL Zoo
    :param hyperparams: Entries that replace those of the preset
    """

    formula: str
    change: str
    algo: str
    hyperparams: dict[str, Any] = field(default_factory=dict)


SHARED = {"policy_kwargs": "dict(features_extractor_class=SharedMlp, net_arch=[])"}
SAMPLED = {"policy_gradient": "sampled", "beta": 0.0}
REINFORCE_PLAIN = {"normalize_returns": False}

RUNGS: dict[str, Rung] = {
    "reinforce-episode": Rung(
        "ln pi(a_t) sum_k gamma^k r_k",
        "whole-episode return",
        "reinforce",
        {**REINFORCE_PLAIN, "return_to_go": False},
    ),
    "reinforce-to-go": Rung("ln pi(a_t) G_t", "only what comes after the action", "reinforce", REINFORCE_PLAIN),
    "reinforce-baseline": Rung(
        "ln pi(a_t) (G_t - V)", "a learnt baseline", "reinforce", {**REINFORCE_PLAIN, "baseline": True}
    ),
    "reinforce-normalized": Rung("ln pi(a_t) (G_t - mean) / std", "normalised instead", "reinforce"),
    "q-shared": Rung("ln pi(a_t) Q(a_t)", "a critic, on a shared body; n-step returns", "qa2c", {**SAMPLED, **SHARED}),
    "q-shared-advantage": Rung("ln pi(a_t) (Q(a_t) - V~)", "its advantage", "qa2c", {**SAMPLED, **SHARED, "baseline": True}),
    "q-separate": Rung("ln pi(a_t) Q(a_t)", "separate bodies", "qa2c", SAMPLED),
    "q-separate-advantage": Rung("ln pi(a_t) (Q(a_t) - V~)", "its advantage", "qa2c", {**SAMPLED, "baseline": True}),
    "task1": Rung("sum_a pi(a) Q(a)", "all actions instead of the sampled one", "qa2c", {"baseline": False, "beta": 0.0}),
    "task2": Rung("sum_a pi(a) (Q(a) - V~)", "the advantage: the same gradient", "qa2c", {"baseline": True, "beta": 0.0}),
    "beta1": Rung(
        "sum_a pi(a) Q(a) + ln pi(a_t) (R_t - Q(a_t))",
        "the critic's error corrected",
        "qa2c",
        {"baseline": False, "beta": 1.0},
    ),
    "a2c": Rung("ln pi(a_t) (R_t - V)", "SB3's A2C, with RL Zoo's settings", "a2c"),
    "ppo": Rung("min(rho A, clip(rho) A), rho = pi(a_t) / pi_old(a_t)", "SB3's PPO, with RL Zoo's settings", "ppo"),
    "dqn": Rung("(none: the greedy action of Q)", "SB3's DQN, with RL Zoo's settings", "dqn"),
}
# Tasks, and the other rungs whose names are not RL Zoo's: the algorithm there, and what replaces the preset's entries
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (rung.algo, rung.hyperparams) for name, rung in RUNGS.items() if name != rung.algo
}


@dataclass(frozen=True)
class Study:
    """
    What a study is where nothing else is said.

    :param env_ids: Environments
    :param algos: Names of tasks, of rungs, or of RL Zoo's algorithms
    :param seeds: Seeds of each
    :param steps: Environment steps of each; 0 for as many as the preset has
    :param eval_freq: Environment steps between two evaluations
    :param eval_episodes: Whole episodes of an evaluation
    :param wandb: Mode of Weights & Biases
    """

    env_ids: tuple[str, ...]
    algos: tuple[str, ...] = ("a2c", "task1", "task2")
    seeds: tuple[int, ...] = (0, 100)
    steps: int = 0
    eval_freq: int = 300_000
    eval_episodes: int = 30
    wandb: str = "offline"


TEN_SEEDS = tuple(range(10))
STUDIES = {
    "pong": Study(("PongNoFrameskip-v4",)),
    "spaceinvaders": Study(("SpaceInvadersNoFrameskip-v4",), ("a2c", "task1")),
    "cartpole": Study(("CartPole-v1",), eval_freq=50_000),
    "classic": Study(("CartPole-v1", "Acrobot-v1"), seeds=TEN_SEEDS, eval_freq=50_000, wandb="disabled"),
    "tabular": Study(
        ("FrozenLake-v1", "Blackjack-v1"), ("a2c", "task1", "beta1"), TEN_SEEDS, eval_freq=50_000, wandb="disabled"
    ),
    "minatar": Study(
        tuple(MINATAR_GAMES),
        seeds=TEN_SEEDS,
        eval_freq=100_000,
        wandb="disabled",
    ),
    "ladder": Study(
        ("CartPole-v1",), tuple(RUNGS), tuple(range(5)), steps=125_000, eval_freq=25_000, eval_episodes=10, wandb="disabled"
    ),
}


def study_of(name: str) -> Study:
    """
    :param name: Short name of a study, or an environment
    :return: the study
    """
    return STUDIES.get(name, Study((name,)))
