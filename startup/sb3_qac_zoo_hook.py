"""
Start-up hook: makes ``python -m rl_zoo3.train --algo qa2c`` work on a stock RL Zoo, which has no plugins.

Every interpreter of the environment runs ``install`` when it starts, through ``sb3_qac_zoo_hook.pth`` (from Python 3.15 on
``sb3_qac_zoo_hook.start``, PEP 829). So this file uses the standard library only, imports only what the interpreter has
already loaded, never raises, and only stays the first finder until ``rl_zoo3`` itself is imported. If registering fails, for
instance because the internals of RL Zoo have changed, it warns once, and RL Zoo works as it would without this file.

Off switch: the environment variable ``SB3_QAC_ZOO_HOOK=0``.
"""

import os
import sys

# The modules of RL Zoo in which sb3_qac.zoo registers, each right after it has been executed
ZOO_MODULES = ("rl_zoo3.utils", "rl_zoo3.hyperparams_opt", "rl_zoo3.exp_manager")
# Those that are being sought. Another finder may ask all finders too, and so this one again
SOUGHT = set()


class ZooFinder:
    """Finds RL Zoo's modules through the other finders, and registers sb3_qac in each after it has been executed."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        cls.go_first()
        if name not in ZOO_MODULES or name in SOUGHT:
            return None
        SOUGHT.add(name)
        try:
            for finder in list(sys.meta_path):
                if finder is cls or not hasattr(finder, "find_spec"):
                    continue
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    if type(spec.loader).__name__ == "LazyLoader":
                        # Of importlib: it executes the module with the loader inside, and later
                        spec.loader.loader = ZooLoader(spec.loader.loader)
                    elif hasattr(spec.loader, "exec_module"):
                        spec.loader = ZooLoader(spec.loader)
                    return spec
            return None
        finally:
            SOUGHT.discard(name)

    @classmethod
    def go_first(cls):
        """A finder that was inserted later, such as the one of pytest, may find RL Zoo's modules without asking the others."""
        if sys.meta_path[0] is not cls:
            try:
                sys.meta_path.remove(cls)
            except ValueError:
                return  # Registering has failed
            sys.meta_path.insert(0, cls)


class ZooLoader:
    """Another finder's loader, which stays as it is, because it may load other modules too."""

    loader = None  # In a copy that is being made

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def exec_module(self, module):
        self.loader.exec_module(module)
        register(module)


def register(module):
    """:param module: One of RL Zoo's modules, after it has been executed"""
    if ZooFinder not in sys.meta_path:
        return  # Registering already failed in another module
    try:
        from sb3_qac.zoo import register_in

        register_in(module)
    except Exception as error:
        import warnings

        sys.meta_path.remove(ZooFinder)
        try:
            warnings.warn(
                f"sb3_qac could not register its algorithms in {module.__name__} ({type(error).__name__}: {error}). "
                "`python -m sb3_qac doctor` looks for the cause; SB3_QAC_ZOO_HOOK=0 in the environment switches this off.",
                stacklevel=2,
            )
        except UserWarning as warning:
            # With `python -W error`, which must not keep RL Zoo from being imported
            print(warning, file=sys.stderr)


def install():
    """Register the finder, once, unless the off switch is set."""
    if os.environ.get("SB3_QAC_ZOO_HOOK") != "0" and ZooFinder not in sys.meta_path:
        sys.meta_path.insert(0, ZooFinder)
