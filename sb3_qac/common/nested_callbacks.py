from collections.abc import Iterator

from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EventCallback


def flatten(callback: BaseCallback) -> Iterator[BaseCallback]:
    """
    :param callback: A callback
    :return: the callback and all callbacks that it calls
    """
    yield callback
    children: list[BaseCallback | None] = list(callback.callbacks) if isinstance(callback, CallbackList) else []
    if isinstance(callback, EventCallback):
        children += [callback.callback, getattr(callback, "callback_on_new_best", None)]
    for child in children:
        if child is not None:
            yield from flatten(child)
