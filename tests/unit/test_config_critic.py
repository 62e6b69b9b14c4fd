"""I20 for [critic]: a missing or useless section and options without effect are one clear error each, before work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.checked import check_before_work
from headrace.cli.dry_run import print_dry_run
from headrace.config.critic import SeparateCriticConfig, SharedCriticConfig
from headrace.config.load import load_config, resolved, restore_config
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError

RUN = """
[model]
path = "somewhere"
[tasks]
type = "arithmetic"
[[rewards]]
type = "exact"
[algorithm]
preset = "{preset}"
[trainer]
num_batches = 10
num_minibatches = {num_minibatches}
"""


def load(tmp_path: Path, critic: str = "", *, preset: str = "ppo_critic", num_minibatches: int = 2) -> RunConfig:
    path = tmp_path / "run.toml"
    section = f"[critic]\n{critic}\n" if critic else ""
    path.write_text(RUN.format(preset=preset, num_minibatches=num_minibatches) + section)
    return load_config(path)


def refused(tmp_path: Path, critic: str = "", **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_before_work(load(tmp_path, critic, **options))
    return str(caught.value)


@pytest.mark.parametrize(
    ("critic", "kind"),
    [
        ('type = "shared"', SharedCriticConfig),
        ('type = "shared"\ntrain_backbone = true\nloss_coefficient = 0.5', SharedCriticConfig),
        ('type = "separate"\nwarmup_batches = 9\nvalue_clip = 0.3', SeparateCriticConfig),
        ('type = "separate"\npath = "other"\n[critic.lora]\nrank = 2', SeparateCriticConfig),
    ],
)
def test_both_kinds_are_accepted(tmp_path: Path, critic: str, kind: type) -> None:
    """The checks refuse nothing that works, and the algorithm gets GAE's numbers."""
    config = load(tmp_path, critic + ("" if "lora" in critic else "\ngae_lambda = 0.5\ngamma = 0.9"))
    assert isinstance(config.critic, kind)
    algorithm = check_before_work(config).algorithm
    assert algorithm.needs.values
    if "lora" not in critic:
        resolved = algorithm.resolved  # type: ignore[attr-defined]
        assert (resolved.discount, resolved.gae_lambda) == (0.9, 0.5)


def test_an_algorithm_that_needs_a_critic_without_a_section(tmp_path: Path) -> None:
    message = refused(tmp_path)
    assert "'ppo_critic' needs the values of a critic" in message and "[critic]" in message


@pytest.mark.parametrize("preset", ["grpo", "ppo", "rloo"])
def test_a_section_that_the_algorithm_ignores(tmp_path: Path, preset: str) -> None:
    message = refused(tmp_path, 'type = "shared"', preset=preset, num_minibatches=1)
    assert "the section [critic] has no effect" in message and f"'{preset}'" in message


@pytest.mark.parametrize(
    ("critic", "options", "expected"),
    [
        ('type = "shared"\npath = "x"', {}, "critic.path is not a known key"),
        ('type = "separate"\ntrain_backbone = true', {}, "critic.train_backbone is not a known key"),
        ('type = "seperate"', {}, "did you mean 'separate'?"),
        ("learning_rate = 1e-4", {}, "critic.type is missing; choose one of shared, separate"),
        ('type = "shared"\nlearning_rate = -1', {}, "critic.learning_rate"),
        ('type = "shared"\nloss_coefficient = 0.5', {}, "critic.loss_coefficient has no effect"),
        ('type = "separate"\nwarmup_batches = 10', {}, "the policy would never be trained"),
        ('type = "separate"\nvalue_clip = 0.5', {"num_minibatches": 1}, "critic.value_clip has no effect"),
        (
            'type = "separate"\n[critic.schedule]\nfinal_fraction = 0.5',
            {},
            "critic.schedule.final_fraction has no effect",
        ),
        ('type = "separate"\n[critic.schedule]\nwarmup_steps = 20', {}, "the run has 20 optimizer steps"),
    ],
)
def test_options_without_effect(tmp_path: Path, critic: str, options: dict[str, Any], expected: str) -> None:
    message = refused(tmp_path, critic, **options)
    assert expected in message and message.count("critic.") <= 3, message


def test_a_run_that_trains_the_critic_alone_is_one_error(tmp_path: Path) -> None:
    """I20: its policy has no optimizer steps, which is no second problem with its schedule."""
    message = refused(tmp_path, 'type = "shared"\nwarmup_batches = 10')
    assert message.startswith("critic.warmup_batches = 10") and "and also" not in message


def test_the_critics_path_is_looked_up_beside_the_file(tmp_path: Path) -> None:
    """As model.path: a folder beside the run's file, else a model's name."""
    (tmp_path / "mine").mkdir()
    for text, expected in (("mine", str(tmp_path / "mine")), ("org/model", "org/model")):
        critic = load(tmp_path, f'type = "separate"\npath = "{text}"').critic
        assert isinstance(critic, SeparateCriticConfig) and critic.path == expected
    with pytest.raises(ConfigError, match=r'critic\.path = "\./absent": no such folder'):
        load(tmp_path, 'type = "separate"\npath = "./absent"')


def test_a_resolved_configuration_reads_back(tmp_path: Path) -> None:
    """I11: what a resume reads is what ran, and the same keys count as set."""
    config = load(tmp_path, 'type = "separate"\nwarmup_batches = 3\n[critic.lora]\nrank = 2')
    again = restore_config(resolved(config), "the record")
    assert again == config and again.critic is not None and config.critic is not None
    assert again.critic.model_fields_set == config.critic.model_fields_set


def test_dry_run_names_the_critic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What would run, before any model is loaded."""
    print_dry_run(load(tmp_path, 'type = "separate"\nwarmup_batches = 2'))
    out = capsys.readouterr().out
    assert "a copy of the policy's start; learning rate 1e-05, constant; the first 2 batches train it alone" in out
