import os

# Rounds of busy waiting, under a millisecond; the default of GNU OpenMP is 300,000, or billions in some of its versions
SPIN_COUNT = 10_000


def limit_spinning() -> None:
    """
    Make idle OpenMP threads give their core back soon. It must be called before PyTorch is imported.

    Between two operations, threads of GNU OpenMP wait busily for the next one, for milliseconds by default. While the games
    are emulated, the network's threads then take the cores that the games need, and two runs on one machine take them
    from each other. Settings of the user are kept: ``GOMP_SPINCOUNT`` and ``OMP_WAIT_POLICY``.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
