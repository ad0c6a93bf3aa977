"""What can be reached on FrozenLake-v1 and Blackjack-v1."""

import itertools
import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from benchmarks.references import CARDS, OPTIMAL, blackjack_value, dealer_totals, dealt_value, draw, main, q_learning

RESULTS = json.loads((Path(__file__).parents[2] / "results" / "tabular" / "references.json").read_text())


@pytest.mark.parametrize("env_id", OPTIMAL)
def test_the_optimum_is_that_of_the_results(env_id):
    assert OPTIMAL[env_id]() == pytest.approx(RESULTS[env_id]["optimal"], abs=1e-12)


def test_hands_count_an_ace_as_eleven_while_they_can():
    assert draw(0, False, 1) == (11, True) and draw(11, True, 1) == (12, True)
    assert draw(16, True, 10) == (16, False) and draw(12, False, 1) == (13, False)
    assert sum(CARDS.values()) == pytest.approx(1)
    assert all(sum(dealer_totals(*draw(0, False, card)).values()) == pytest.approx(1) for card in CARDS)
    # 21 never loses, and 22 always does
    assert blackjack_value(21, False, 10) > 0.8 and blackjack_value(22, False, 10) == -1


def test_an_ace_with_a_ten_is_worth_what_the_registered_game_pays():
    """It wins against every hand of the dealer but another such one. The defaults of gymnasium's class are other rules."""
    game = gym.make("Blackjack-v1").unwrapped
    rewards = {}
    for shown, hidden in itertools.product(CARDS, repeat=2):
        game.reset(seed=10 * shown + hidden)
        game.player, game.dealer = [1, 10], [shown, hidden]
        rewards[shown, hidden] = game.step(0)[1]
    for shown in CARDS:
        paid = sum(p * rewards[shown, hidden] for hidden, p in CARDS.items())
        assert dealt_value(1, 10, shown) == dealt_value(10, 1, shown) == pytest.approx(paid)
    # Where the dealer shows a ten, any of 13 cards may be the ace
    assert dealt_value(1, 10, 10) == pytest.approx(12 / 13)


@pytest.mark.slow
def test_q_learning_finds_a_policy_that_is_nearly_optimal():
    """The optimum is 0.744; a policy at random reaches the goal in 1 of 70 episodes."""
    learnt = np.mean([q_learning("FrozenLake-v1", seed, 50_000, 300) for seed in range(2)])
    assert 0.5 < learnt < 0.85


def test_the_command_prints_json(capsys):
    assert main(["--steps", "200", "--seeds", "1"]) == 0
    captured = capsys.readouterr()
    # The result alone goes to the standard output, the progress of each environment elsewhere
    assert all(env_id in captured.err for env_id in OPTIMAL)
    printed = json.loads(captured.out)
    assert {env_id: len(found["q_learning"]) for env_id, found in printed.items()} == dict.fromkeys(OPTIMAL, 1)
    with pytest.raises(SystemExit, match="references: `seeds`"):
        main(["--seeds", "0"])
