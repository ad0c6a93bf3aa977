import os

# Small networks: one thread is faster than two that wait for each other, and two tests can share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
