from sb3_qac.common.vec_env.ale_vec_env import AleVecEnv

__all__ = ["AleVecEnv"]
