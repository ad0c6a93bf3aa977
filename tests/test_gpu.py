"""On a GPU: the numbers of the CPU, and exact resume. `make test-gpu` runs these tests on a machine that has one."""

import copy
import os

import numpy as np
import pytest
import torch as th
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.vec_env import VecFrameStack

from sb3_qac import QA2C, QPPO
from sb3_qac.__main__ import main
from sb3_qac.common.buffers import DeviceRolloutBuffer
from sb3_qac.common.callbacks import ExactCheckpointCallback
from sb3_qac.common.env_util import make_ale_vec_env
from sb3_qac.common.files import read_json
from sb3_qac.common.torch_layers import LeanNatureCNN
from tests.envs import InterruptAt, Interrupted
from tests.test_buffers import same_minibatches

pytestmark = pytest.mark.gpu

# cuBLAS reads it when PyTorch first uses the GPU, and is deterministic with it
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

ALGORITHMS = [A2C, PPO, QA2C, QPPO]


@pytest.fixture
def full_precision():
    """Convolutions in float32, where PyTorch's default on a GPU is TF32."""
    with th.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture
def deterministic():
    th.use_deterministic_algorithms(True)
    with th.backends.cudnn.flags(enabled=True, deterministic=True):
        yield
    th.use_deterministic_algorithms(False)


def make_model(algorithm, device="cuda", dtype="float32", **settings):
    """Pong in two environments, rollouts of 8 steps"""
    env = VecFrameStack(make_ale_vec_env("PongNoFrameskip-v4", n_envs=2, seed=0), 4)
    extractor = dict(dtype=dtype, layer_norm="linear")
    policy_kwargs = dict(features_extractor_class=LeanNatureCNN, features_extractor_kwargs=extractor)
    policy_kwargs.update(settings.pop("policy_kwargs", {}))
    if algorithm in (PPO, QPPO):
        settings.update(batch_size=8, n_epochs=2)
    return algorithm("CnnPolicy", env, n_steps=8, policy_kwargs=policy_kwargs, device=device, seed=0, **settings)


def parameters_of(model):
    return th.nn.utils.parameters_to_vector(model.policy.parameters()).detach().cpu()


def test_every_minibatch_is_that_of_the_buffer_of_sb3():
    for expected, drawn in same_minibatches("cuda", n_envs=3):
        for name, tensor in expected._asdict().items():
            assert getattr(drawn, name).is_cuda
            assert th.equal(getattr(drawn, name), tensor), name


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_features_are_those_of_the_cpu(dtype, tolerance, full_precision):
    model = make_model(QA2C, "cpu", dtype)
    images = th.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 4, 84, 84), dtype=np.uint8))
    extractor = model.policy.features_extractor
    expected = extractor(images).detach()
    features = extractor.to("cuda")(images.to("cuda")).detach().cpu()
    assert (features - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_an_update_is_that_of_the_cpu(algorithm, dtype, tolerance, full_precision):
    """With SGD, which is linear in the gradient: others divide by its size, and so enlarge the rounding of small ones."""
    settings = dict(policy_kwargs=dict(optimizer_class=th.optim.SGD, optimizer_kwargs={}), learning_rate=0.01)
    cpu, gpu = (make_model(algorithm, device, dtype, **settings) for device in ("cpu", "cuda"))
    assert th.equal(parameters_of(gpu), parameters_of(cpu))
    for model in (cpu, gpu):
        model.learn(16)
    # The second update has the same weights, the same rollout and the same minibatches
    gpu.policy.load_state_dict(cpu.policy.state_dict())
    gpu.rollout_buffer = copy.deepcopy(cpu.rollout_buffer)
    gpu.rollout_buffer.device = gpu.device
    if algorithm is QPPO:
        gpu.sigma = cpu.sigma
    before = parameters_of(cpu)
    for model in (cpu, gpu):
        np.random.seed(0)
        model.train()

    step = parameters_of(cpu) - before
    assert step.norm() > 0
    assert (parameters_of(gpu) - before - step).norm() < tolerance * step.norm()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rollout_that_is_sent_once_trains_as_with_the_buffer_of_sb3(algorithm, deterministic):
    models = [
        make_model(algorithm, dtype="bfloat16", rollout_buffer_class=buffer).learn(64)
        for buffer in (RolloutBuffer, DeviceRolloutBuffer)
    ]
    assert th.equal(*map(parameters_of, models))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_training_is_identical(algorithm, deterministic, tmp_path):
    def train(folder, stop):
        model = make_model(algorithm, dtype="bfloat16", rollout_buffer_class=DeviceRolloutBuffer)
        model.learn(128, [InterruptAt(stop), ExactCheckpointCallback(tmp_path / folder, save_freq=32, verbose=0)])
        return model

    expected = train("whole", np.inf)
    with pytest.raises(Interrupted):
        train("parts", 80)
    resumed = train("parts", np.inf)

    assert resumed.num_timesteps == expected.num_timesteps == 128
    assert th.equal(parameters_of(resumed), parameters_of(expected))


@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_training_is_resumed_on_the_other_device(first, second, tmp_path):
    def train(device, stop):
        model = make_model(QPPO, device)
        model.learn(128, [InterruptAt(stop), ExactCheckpointCallback(tmp_path, save_freq=32, verbose=0)])
        return model

    with pytest.raises(Interrupted):
        train(first, 80)
    model = train(second, np.inf)

    assert model.num_timesteps == 128
    assert model.device.type == second
    assert th.isfinite(parameters_of(model)).all()


@pytest.mark.parametrize("algorithm", [QA2C, QPPO])
def test_an_agent_plays_without_a_gpu(algorithm, full_precision, tmp_path):
    model = make_model(algorithm)
    model.learn(32)
    model.save(tmp_path / "agent")
    agent = algorithm.load(tmp_path / "agent", device="cpu")
    obs = model.env.reset()
    probabilities = [
        player.policy.get_distribution(player.policy.obs_to_tensor(obs)[0]).distribution.probs.detach().cpu()
        for player in (model, agent)
    ]
    th.testing.assert_close(*probabilities, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("algorithm", [QA2C, QPPO])
def test_training_with_cuda_graphs_computes_what_training_without_them_does(algorithm):
    """As in docs/ale_vec_env.md. Inductor rounds differently, and so the features are compared."""
    model = make_model(algorithm, dtype="bfloat16", rollout_buffer_class=DeviceRolloutBuffer)
    extractor = model.policy.features_extractor
    extractor.compile(mode="reduce-overhead", dynamic=False)
    # CUDA graphs are recorded in the second call and replayed from the third on
    model.learn(64)
    images = th.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 4, 84, 84), dtype=np.uint8)).to("cuda")
    compiled = extractor(images).detach().clone()
    expected = extractor.forward(images).detach()

    assert th.isfinite(parameters_of(model)).all()
    assert (compiled - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("env", ["PongNoFrameskip-v4", "MinAtar/Breakout-v1"])
def test_a_study_trains_and_evaluates(env, tmp_path):
    command = ["study", env, "--algos", "qppo", "qa2c", "--seeds", "0", "--steps", "4096", "--eval-freq", "2048"]
    assert not main([*command, "--eval-episodes", "2", "--wandb", "disabled", "--device", "cuda", "--output", str(tmp_path)])
    for group in ("qppo", "qa2c"):
        status = read_json(tmp_path / f"{group}_seed-0" / "status.json")
        assert status["finished"] and status["steps"] >= 4096 and status["last_evaluation"] is not None
