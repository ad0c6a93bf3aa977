"""The names that a study accepts: the rungs of the ladder, the rows of the ablation, and whole studies."""

from dataclasses import dataclass, field
from typing import Any

from sb3_qac.common.minatar import MINATAR_GAMES

# The course documents' names of three algorithms. A run has the name that it was asked for by; tables, plots and reports show
# the field's names
FIELD_NAMES = {"task1": "all-action", "task2": "all-action-baseline", "beta1": "beta-loo"}


@dataclass(frozen=True)
class Rung:
    """
    One algorithm of the ladder.

    :param formula: What the actor maximises, the mean over steps
    :param change: What it changes relative to the rung below
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
    "all-action": Rung("sum_a pi(a) Q(a)", "all actions instead of the sampled one", "qa2c", {"baseline": False, "beta": 0.0}),
    "all-action-baseline": Rung(
        "sum_a pi(a) (Q(a) - V~)", "the advantage: the same gradient", "qa2c", {"baseline": True, "beta": 0.0}
    ),
    "beta-loo": Rung(
        "sum_a pi(a) Q(a) + ln pi(a_t) (R_t - Q(a_t))",
        "the critic's error corrected",
        "qa2c",
        {"baseline": False, "beta": 1.0},
    ),
    "a2c": Rung("ln pi(a_t) (R_t - V)", "A2C with RL Zoo's settings", "a2c"),
    "ppo": Rung("min(rho A, clip(rho) A), rho = pi(a_t) / pi_old(a_t)", "PPO with RL Zoo's settings", "ppo"),
    "dqn": Rung("(none: the greedy action of Q)", "DQN with RL Zoo's settings", "dqn"),
}
# Rungs whose names are not RL Zoo's: the algorithm's name there, and entries that replace those of the preset
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (rung.algo, rung.hyperparams) for name, rung in RUNGS.items() if name != rung.algo
}
# QPPO with one part changed, each with the entries that replace those of MinAtar's preset
ABLATION: dict[str, dict[str, Any]] = {
    "qppo-sampled": {"policy_gradient": "sampled"},
    "qppo-no-correction": {"beta": 0.0},
    "qppo-no-shrinkage": {"shrinkage": 0.0},
    "qppo-no-scale": {"normalize_advantage": False},
    "qppo-no-kl": {"kl_coef": 0.0},
    "qppo-one-epoch": {"n_epochs": 1},
    # Entries of the network replace all others, so the ones that do not change are repeated. The preset has no LayerNorm
    "qppo-no-dueling": {"policy_kwargs": "dict(features_extractor_class=MinAtarCNN, net_arch=[])"},
    "qppo-layer-norm": {
        "policy_kwargs": "dict(features_extractor_class=MinAtarCNN, features_extractor_kwargs=dict(layer_norm='all'), "
        "net_arch=[], dueling=True)"
    },
}
TASKS |= {name: ("qppo", changes) for name, changes in ABLATION.items()}

# What `benchmark` measures unless told otherwise; the first algorithm is the baseline
BENCHMARKED = ("a2c", "qa2c", "ppo", "qppo")
# Of an Atari game: SB3's environments and network, or the native environments and `LeanNatureCNN` in one of two precisions
VARIANTS: dict[str, dict[str, Any]] = {
    "stock": dict(native=False, dtype=None),
    "float32": dict(native=True, dtype="float32"),
    "bfloat16": dict(native=True, dtype="bfloat16"),
}


@dataclass(frozen=True)
class Study:
    """
    Defaults of a study.

    :param env_ids: Environments
    :param cost: What a run of it took on one core, and what it keeps on the disk
    :param algos: Rungs, or algorithms of RL Zoo
    :param seeds: Seeds of each
    :param steps: Environment steps of each; 0 for as many as the preset has
    :param eval_freq: Environment steps between two evaluations
    :param eval_episodes: Whole episodes of an evaluation
    :param wandb: Mode of Weights & Biases
    """

    env_ids: tuple[str, ...]
    cost: str = ""
    algos: tuple[str, ...] = ("a2c", "all-action", "all-action-baseline")
    seeds: tuple[int, ...] = (0, 100)
    steps: int = 0
    eval_freq: int = 300_000
    eval_episodes: int = 30
    wandb: str = "offline"


TEN_SEEDS = tuple(range(10))
STUDIES = {
    "pong": Study(("PongNoFrameskip-v4",), "1.8 to 3.7 hours in bfloat16 until it returns 18, 60 MB"),
    "spaceinvaders": Study(("SpaceInvadersNoFrameskip-v4",), "2.7 to 4.8 hours in bfloat16, 60 MB", ("a2c", "all-action")),
    "cartpole": Study(("CartPole-v1",), "1 to 3 minutes, 1 MB", eval_freq=50_000),
    "classic": Study(
        ("CartPole-v1", "Acrobot-v1"), "1 to 3 minutes, 1 MB", seeds=TEN_SEEDS, eval_freq=50_000, wandb="disabled"
    ),
    "tabular": Study(
        ("FrozenLake-v1", "Blackjack-v1"),
        "30 seconds to 3 minutes, 1 MB",
        ("a2c", "all-action", "beta-loo"),
        TEN_SEEDS,
        eval_freq=50_000,
        wandb="disabled",
    ),
    "minatar": Study(
        tuple(MINATAR_GAMES),
        "2 to 10 minutes, 5 MB",
        ("a2c", "all-action", "beta-loo"),
        TEN_SEEDS,
        eval_freq=100_000,
        wandb="disabled",
    ),
    "ablation": Study(
        tuple(f"MinAtar/{game}-v1" for game in ("Asterix", "Breakout", "SpaceInvaders")),
        "30 seconds to 4 minutes, 5 MB",
        ("qppo", *ABLATION),
        tuple(range(10, 20)),
        steps=600_000,
        eval_freq=100_000,
        wandb="disabled",
    ),
    "ladder": Study(
        ("CartPole-v1",),
        "10 seconds to 4 minutes, 1 MB",
        tuple(RUNGS),
        tuple(range(5)),
        steps=125_000,
        eval_freq=25_000,
        eval_episodes=10,
        wandb="disabled",
    ),
}


def study_of(name: str) -> Study:
    """
    :param name: Short name of a study, or an environment
    :return: the study
    """
    return STUDIES.get(name, Study((name,)))


def field_name(name: str) -> str:
    """
    :param name: Name of an algorithm, or of a run such as "task1_seed-0"
    :return: the same name, with the field's name of the algorithm
    """
    group, seed, number = name.partition("_seed-")
    return f"{FIELD_NAMES.get(group, group)}{seed}{number}"
