import numpy as np


def discounted_returns(rewards: np.ndarray, dones: np.ndarray, last_values: np.ndarray | float, gamma: float) -> np.ndarray:
    """
    Discounted sums of the rewards to the end of the episode, ``G_t = sum_{k >= t} gamma^(k - t) r_k``.

    :param rewards: Rewards, shape (n_steps, n_envs)
    :param dones: Whether an episode ends with the step, shape (n_steps, n_envs)
    :param last_values: Bootstrap value after the last step, for episodes that continue, shape (n_envs,); 0 for none
    :param gamma: Discount factor
    :return: Returns, shape (n_steps, n_envs)
    """
    returns = np.zeros(rewards.shape)
    following = last_values
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * np.logical_not(dones[t]) * following
        returns[t] = following
    return returns
