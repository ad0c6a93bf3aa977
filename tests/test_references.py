"""What can be reached on FrozenLake-v1 and Blackjack-v1."""

import json
from pathlib import Path

import numpy as np
import pytest

from sb3_qac.__main__ import main
from sb3_qac.study.references import CARDS, OPTIMAL, blackjack_value, dealer_totals, draw, q_learning

RESULTS = json.loads((Path(__file__).parent.parent / "results" / "tabular" / "references.json").read_text())


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


def test_q_learning_finds_a_policy_that_is_nearly_optimal():
    """The optimum is 0.744; a policy at random reaches the goal in 1 of 70 episodes."""
    learnt = np.mean([q_learning("FrozenLake-v1", seed, 50_000, 300) for seed in range(2)])
    assert 0.5 < learnt < 0.85


def test_the_command_prints_json(capsys):
    assert main(["references", "--steps", "200", "--seeds", "1"]) == 0
    captured = capsys.readouterr()
    # The result alone goes to the standard output, the progress of each environment elsewhere
    assert all(env_id in captured.err for env_id in OPTIMAL)
    printed = json.loads(captured.out)
    assert {env_id: len(found["q_learning"]) for env_id, found in printed.items()} == dict.fromkeys(OPTIMAL, 1)
    with pytest.raises(SystemExit, match="references: `seeds`"):
        main(["references", "--seeds", "0"])
