"""Agents of a study, played again and exported."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch as th
import yaml
from stable_baselines3 import SAC

from sb3_qac import QA2C
from sb3_qac.__main__ import main
from sb3_qac.common.vec_env import AleVecEnv
from sb3_qac.study.agents import evaluate_agent, evaluation_line, export_agent
from sb3_qac.study.diagnosis import diagnose_run
from sb3_qac.study.grid import make_grid, run_study
from sb3_qac.study.loading import load_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    settings = dict(n_timesteps=800, eval_freq=800, n_eval_episodes=2, wandb="disabled", device="cpu")
    # Its observations are normalised
    (run,) = make_grid("Acrobot-v1", ["all-action"], [0], tmp_path_factory.mktemp("study"), **settings)
    assert run_study([run]) == {}
    return run


def test_the_mean_and_the_spread_are_those_of_the_episodes(run, capsys, monkeypatch):
    returns = {False: [-500.0, -490.0, -480.0], True: [-100.0, -100.0, -100.0]}

    def evaluate(model, env, n_episodes, deterministic, return_episode_rewards):
        assert n_episodes == 3 and env.num_envs == 3 and return_episode_rewards
        # Normalised as in training, without learning how
        assert env.obs_rms.count > 800 and not env.training
        return returns[deterministic], [500, 490, 480] if not deterministic else [100, 100, 101]

    monkeypatch.setattr("sb3_qac.study.agents.evaluate_policy", evaluate)
    assert main(["evaluate", run.folder, "--episodes", "3", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line == {
        "env": "Acrobot-v1",
        "run": "all-action_seed-0",
        "episodes": 3,
        "sampled": -490.0,
        "sampled_std": 10.0,
        "sampled_error": pytest.approx(10 / np.sqrt(3)),
        "sampled_different": 3,
        "greedy": -100.0,
        "greedy_std": 0.0,
        "greedy_error": 0.0,
        "greedy_different": 2,
    }
    assert main(["evaluate", run.folder, "--episodes", "3"]) == 0
    assert (
        capsys.readouterr().out
        == "Acrobot-v1 all-action_seed-0: sampled -490.00 (std 10.00), greedy -100.00 (std 0.00), n = 3\n"
    )


@pytest.mark.slow
def test_new_episodes_are_played_and_the_same_ones_again(run):
    first, second = (evaluate_agent(Path(run.folder), 2) for _ in range(2))
    assert first == second and -500 <= first["sampled"] < 0
    assert evaluate_agent(Path(run.folder), 1)["sampled_std"] is None
    with pytest.raises(ValueError, match="`episodes`"):
        evaluate_agent(Path(run.folder), 0)


@pytest.mark.slow
@pytest.mark.parametrize("native", [True, False])
def test_atari_games_are_played_in_the_environments_of_the_run(native, tmp_path, monkeypatch):
    settings = dict(n_timesteps=10, eval_freq=1000, n_eval_episodes=1, wandb="disabled", device="cpu", native=native)
    (run,) = make_grid("PongNoFrameskip-v4", ["task1"], [0], tmp_path, hyperparams={"n_envs": 1}, **settings)
    assert run_study([run]) == {}
    environments = []

    def evaluate(model, env, n_episodes, deterministic, return_episode_rewards):
        environments.append(env.unwrapped)
        return [21.0] * n_episodes, list(range(n_episodes)) if not deterministic else [7, 8, 7]

    monkeypatch.setattr("sb3_qac.study.agents.evaluate_policy", evaluate)
    result = evaluate_agent(Path(run.folder), 3)
    assert result["greedy"] == 21.0
    # Without sticky actions many greedy games are the same
    assert evaluation_line(result).endswith("sampled 21.00 (std 0.00), greedy 21.00 (std 0.00, 2 different games), n = 3")
    assert [isinstance(env, AleVecEnv) for env in environments] == [native, native]
    assert [env.num_envs for env in environments] == [3, 3]


def test_an_exported_agent_is_smaller_acts_the_same_and_plays_in_rl_zoo(run, tmp_path, capsys, rl_zoo):
    assert main(["export", run.folder, str(tmp_path)]) == 0
    kept = Path(capsys.readouterr().out.strip())
    original = Path(run.folder, "Acrobot-v1.zip")
    assert kept == tmp_path / "qa2c" / "Acrobot-v1_1" / "Acrobot-v1.zip"
    assert kept.stat().st_size < 0.7 * original.stat().st_size
    obs = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)
    models = [QA2C.load(path, device="cpu") for path in (original, kept)]
    assert th.equal(*(th.as_tensor(model.predict(obs, deterministic=True)[0]) for model in models))
    # Another agent does not replace it
    before = kept.read_bytes()
    assert main(["export", run.folder, str(tmp_path)]) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "qa2c" / "Acrobot-v1_2" / "Acrobot-v1.zip"
    assert kept.read_bytes() == before
    enjoy = ["--algo", "qa2c", "--env", "Acrobot-v1", "-f", tmp_path, "--no-render", "-n", 600]
    assert "Episode Reward" in rl_zoo("enjoy", *enjoy, cwd=tmp_path)


def test_exported_agents_are_numbered_in_a_folder_whose_name_is_a_pattern(run, tmp_path, capsys):
    folder = tmp_path / "agents [1]"
    for number in (1, 2):
        assert main(["export", run.folder, str(folder)]) == 0
        assert Path(capsys.readouterr().out.strip()).parent == folder / "qa2c" / f"Acrobot-v1_{number}"


def test_a_run_without_an_agent_is_refused(run, tmp_path):
    folder = tmp_path / "unfinished"
    folder.mkdir()
    (folder / "run.json").write_text(Path(run.folder, "run.json").read_text())
    # As earlier versions left it after Ctrl-C
    (folder / "Acrobot-v1.zip").write_bytes(Path(run.folder, "Acrobot-v1.zip").read_bytes())
    for command in (["evaluate", str(folder)], ["export", str(folder), str(tmp_path)]):
        with pytest.raises(SystemExit, match=r"There is no final agent in .*unfinished"):
            main(command)
    with pytest.raises(SystemExit, match=r"^export: There is no run of a study in .* The runs in .* are all-action_seed-0\."):
        main(["export", str(Path(run.folder).parent), str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^evaluate: There is no run of a study in .*run.json"):
        main(["evaluate", str(folder / "run.json")])


def test_the_agents_after_one_that_cannot_be_played_are_evaluated(run, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"^evaluate: There is no run of a study in .*\.$"):
        main(["evaluate", str(tmp_path), run.folder, "--episodes", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["run"] == Path(run.folder).name


@pytest.mark.parametrize("command", ["diagnose", "evaluate", "video"])
def test_an_agent_whose_environment_is_gone_is_named_as_such(command, run, tmp_path, capsys):
    folder = tmp_path / "all-action_seed-0"
    shutil.copytree(run.folder, folder)
    settings = {**json.loads((folder / "run.json").read_text()), "env_id": "Acrobat-v1"}
    (folder / "run.json").write_text(json.dumps(settings))
    others = [run.folder, "--episodes", "1", "--json"] if command == "evaluate" else []
    with pytest.raises(SystemExit, match=rf"^{command}: Environment `Acrobat` doesn't exist. Did you mean: `Acrobot`"):
        main([command, str(folder), *others])
    if others:
        assert json.loads(capsys.readouterr().out)["env"] == "Acrobot-v1"


@pytest.mark.parametrize("command", ["evaluate", "video"])
def test_an_agent_of_minatar_is_not_played_without_the_package(command, run, tmp_path, monkeypatch):
    folder = tmp_path / "all-action_seed-0"
    shutil.copytree(run.folder, folder)
    settings = {**json.loads((folder / "run.json").read_text()), "env_id": "MinAtar/Breakout-v1"}
    (folder / "run.json").write_text(json.dumps(settings))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=rf"^{command}: MinAtar/Breakout-v1 needs the package minatar: pip install"):
        main([command, str(folder)])


@pytest.mark.parametrize("command", ["diagnose", "evaluate", "export", "video"])
def test_a_missing_folder_leads_to_the_runs_next_to_it(command, tmp_path):
    for name in ("task1_seed-0", "qppo_seed-0", "task1_seed-100"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"name": name, "group": "x", "env_id": "CartPole-v1"}))
    output = [str(tmp_path)] if command == "export" else []
    message = r"There is no run of a study in .*all-action_seed-0\. The runs in .* are qppo_seed-0, task1_seed-0, "
    with pytest.raises(SystemExit, match=f"^{command}: {message}"):
        main([command, str(tmp_path / "all-action_seed-0"), *output])


@pytest.mark.parametrize("missing", ["vecnormalize.pkl", "config.yml"])
def test_an_agent_without_its_settings_or_its_statistics_is_not_played(missing, run, tmp_path):
    """RL Zoo would begin new statistics, with which the agent plays badly."""
    folder = tmp_path / "all-action_seed-0"
    shutil.copytree(run.folder, folder)
    (folder / "Acrobot-v1" / missing).unlink()
    for command in (["evaluate", str(folder)], ["export", str(folder), str(tmp_path / "agent")]):
        with pytest.raises(SystemExit, match=f"^{command[0]}: There is no Acrobot-v1/{missing} in .*all-action_seed-0"):
            main(command)
    assert not (tmp_path / "agent").exists()


def test_an_export_that_fails_leaves_nothing_that_enjoy_would_play(run, tmp_path, monkeypatch):
    def fail(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("sb3_qac.study.agents.compress", fail)
    assert main(["export", run.folder, str(tmp_path)]) == 130
    assert list((tmp_path / "qa2c").iterdir()) == []


def test_an_agent_whose_policy_has_no_optimizer_of_its_own_is_exported(tmp_path):
    settings = dict(n_timesteps=120, eval_freq=120, n_eval_episodes=1, wandb="disabled", device="cpu")
    (run,) = make_grid("Pendulum-v1", ["sac"], [0], tmp_path, hyperparams=dict(learning_starts=100), **settings)
    assert run_study([run]) == {}
    agent = SAC.load(export_agent(Path(run.folder), tmp_path / "agents"), device="cpu")
    obs = np.zeros((1, 3), np.float32)
    original = SAC.load(Path(run.folder, "Pendulum-v1.zip"), device="cpu")
    np.testing.assert_array_equal(*(model.predict(obs, deterministic=True)[0] for model in (agent, original)))


def test_a_large_seed_is_evaluated(run, tmp_path):
    folder = tmp_path / "all-action_seed-0"
    shutil.copytree(run.folder, folder)
    settings = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**settings, "seed": 2**32 - 1}))
    assert -500 <= evaluate_agent(folder, 1)["sampled"] < 0


def test_an_agent_whose_settings_contain_classes_and_tuples_is_played(tmp_path):
    """RL Zoo writes them with tags of Python, which a safe loader of YAML does not know."""
    (tmp_path / "settings.py").write_text(
        "import torch.nn as nn\n"
        "kwargs = dict(activation_fn=nn.ReLU, net_arch=dict(pi=[8], vf=[8]), optimizer_kwargs=dict(betas=(0.8, 0.9)))\n"
        "kwargs['optimizer_class'] = __import__('torch').optim.Adam\n"
        "hyperparams = {'CartPole-v1': dict(n_envs=4, n_timesteps=40, policy='MlpPolicy', policy_kwargs=kwargs)}\n"
    )
    settings = dict(n_timesteps=40, eval_freq=40, n_eval_episodes=1, wandb="disabled", device="cpu")
    (run,) = make_grid("CartPole-v1", ["a2c"], [0], tmp_path / "study", tmp_path / "settings.py", **settings)
    assert run_study([run]) == {}
    assert "python/tuple" in Path(run.folder, "CartPole-v1", "config.yml").read_text()
    assert evaluate_agent(Path(run.folder), 1)["sampled"] >= 1
    config = load_run(Path(run.folder)).settings["resolved_hyperparams"]["policy_kwargs"]
    assert config["activation_fn"] == "torch.nn.modules.activation.ReLU" and config["optimizer_kwargs"] == {
        "betas": [0.8, 0.9]
    }
    # The same file is not taken for another one, another class is
    assert run_study([run]) == {}
    (tmp_path / "settings.py").write_text((tmp_path / "settings.py").read_text().replace("ReLU", "Tanh"))
    with pytest.raises(ValueError, match=r"finished run with other hyperparameters: `policy_kwargs` is .*Tanh.* was .*ReLU"):
        run_study([run])


@pytest.mark.parametrize("content", ["", "policy: [", "- 1\n", "!!python/object/apply:collections.OrderedDict []"])
def test_damaged_settings_of_an_agent_are_named(content, run, tmp_path):
    folder = tmp_path / "all-action_seed-0"
    shutil.copytree(run.folder, folder)
    (folder / "Acrobot-v1" / "config.yml").write_text(content)
    with pytest.raises(SystemExit, match=r"^evaluate: .*Acrobot-v1/config.yml is damaged: it (has no|cannot be)"):
        main(["evaluate", str(folder)])
    # A report has what is left
    assert "resolved_hyperparams" not in load_run(folder).settings


@pytest.mark.parametrize("size", [0, 20_000])
def test_an_agent_that_was_cut_short_is_refused(size, run, tmp_path):
    cut = shutil.copytree(run.folder, tmp_path / "cut")
    agent = cut / f"{run.env_id}.zip"
    agent.write_bytes(agent.read_bytes()[:size])
    for command, *output in (["evaluate"], ["export", str(tmp_path / "logs")], ["video"]):
        with pytest.raises(SystemExit, match=r"Acrobot-v1\.zip is damaged"):
            main([command, str(cut), *output])


def test_an_agent_is_not_played_in_other_environments_than_it_was_trained_in(tmp_path):
    """The file of hyperparameters was edited."""
    path, entries = tmp_path / "mine.yml", dict(n_timesteps=32, policy="MlpPolicy", n_steps=8, batch_size=8, n_envs=1)
    path.write_text(yaml.safe_dump({"CartPole-v1": entries}))
    settings = dict(n_timesteps=32, eval_freq=32, n_eval_episodes=1, wandb="disabled", device="cpu")
    (run,) = make_grid("CartPole-v1", ["qppo"], [0], tmp_path, config=str(path), **settings)
    assert run_study([run]) == {}
    folder = Path(run.folder)
    # Not a matter of the environments
    path.write_text(yaml.safe_dump({"CartPole-v1": {**entries, "ent_coef": 0.5}}))
    assert evaluate_agent(folder, 1)["sampled"] > 0
    wrapper = {"gymnasium.wrappers.StickyAction": {"repeat_action_probability": 0.8}}
    path.write_text(yaml.safe_dump({"CartPole-v1": {**entries, "env_wrapper": [wrapper]}}))
    for play in (evaluate_agent, diagnose_run):
        with pytest.raises(
            ValueError, match=r"trained in other environments: `env_wrapper` is .*StickyAction.*, and was None"
        ):
            play(folder)
