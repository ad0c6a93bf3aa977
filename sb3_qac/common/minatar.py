import importlib.util

import gymnasium as gym

# gymnasium's name of each of MinAtar's games, and MinAtar's own
MINATAR_GAMES = {
    f"MinAtar/{game.title().replace('_', '')}-v1": game
    for game in ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
}


def check_minatar(env_id: str) -> None:
    """
    :param env_id: Environment
    :raises ValueError: if it is one of MinAtar's games and the package is not installed
    """
    if env_id.startswith("MinAtar/") and importlib.util.find_spec("minatar") is None:
        raise ValueError(f"{env_id} needs the package minatar: pip install '.[minatar]', in the checkout")


def register_minatar_envs() -> None:
    """
    Register MinAtar's games in gymnasium, with the names and settings of ``minatar.gym.register_envs`` ("MinAtar/Breakout-v1"
    and so on, with the minimal action set). It does not import minatar, which would take a second. If the package is not
    installed, it does nothing.
    """
    if importlib.util.find_spec("minatar") is None:
        return
    for env_id, game in MINATAR_GAMES.items():
        if env_id not in gym.registry:
            gym.register(env_id, entry_point="minatar.gym:BaseEnv", kwargs=dict(game=game, use_minimal_action_set=True))
