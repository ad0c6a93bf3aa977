from sb3_qac.pqn.pqn import PQN

__all__ = ["PQN"]
