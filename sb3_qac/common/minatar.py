import importlib.util

import gymnasium as gym

# gymnasium's name of each of MinAtar's games, and MinAtar's own
MINATAR_GAMES = {
    f"MinAtar/{game.title().replace('_', '')}-v1": game
    for game in ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
}


def register_minatar_envs() -> None:
    """
    Make MinAtar's games known to gymnasium, by the names and settings that its own ``minatar.gym.register_envs`` has for
    them ("MinAtar/Breakout-v1" and its like, with the actions that do something in the game), without the second that
    importing it takes. Without the package it does nothing.
    """
    if importlib.util.find_spec("minatar") is None:
        return
    for env_id, game in MINATAR_GAMES.items():
        if env_id not in gym.registry:
            gym.register(env_id, entry_point="minatar.gym:BaseEnv", kwargs=dict(game=game, use_minimal_action_set=True))
