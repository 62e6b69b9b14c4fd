"""The four verbs on a tiny model: steps, versions, guards, metrics, LoRA, bfloat16."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.algorithms.fields import LossOutput, Minibatch, TokenFields, Totals
from headrace.config.base import LoraConfig
from headrace.config.schema import TrainerConfig
from headrace.model.load import prepare_model
from headrace.protocols import Trainer
from headrace.testing import Reinforce, make_sample, tiny_model, tiny_tokenizer
from headrace.trainer.trainer import PolicyTrainer
from headrace.trainer.weights import NonFiniteError
from headrace.types import PolicyVersion, Sample

SAMPLES = tuple(make_sample([1, 6, 20], [30 + m, 31, 4], group=m // 2, member=m % 2) for m in range(4))
ADVANTAGES = {sample.id: 1.0 - 2.0 * (i % 2) for i, sample in enumerate(SAMPLES)}


def make_trainer(*, dtype: str = "float32", lora: LoraConfig | None = None, **options: Any) -> PolicyTrainer:
    keywords = {name: options.pop(name) for name in ("with_reference", "num_steps") if name in options}
    loaded = prepare_model(tiny_model(initializer_range=0.2), tiny_tokenizer(), dtype, lora=lora)
    config = TrainerConfig(**{"learning_rate": 1e-2, **options})
    return PolicyTrainer(loaded, config, **{"num_steps": 10, **keywords})


def minibatch_of(samples: tuple[Sample, ...] = SAMPLES, advantages: dict[str, float] = ADVANTAGES) -> Minibatch:
    return Minibatch(
        samples=samples,
        advantages=[torch.tensor(s.mask, dtype=torch.float32) * advantages[s.id] for s in samples],
        proximal_logprobs=None,
        reference_logprobs=None,
        totals=Totals(num_tokens=sum(s.num_trained for s in samples), num_episodes=len(samples), max_length=3),
    )


def train_once(trainer: PolicyTrainer, minibatch: Minibatch | None = None) -> dict[str, float]:
    metrics = trainer.forward_backward(minibatch or minibatch_of(), Reinforce(ADVANTAGES))
    return metrics | trainer.optim_step()


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer._model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


class Broken(Reinforce):
    """A loss that is NaN or whose gradient is, though the loss is finite."""

    kind = "loss"

    def loss(self, logprobs_N: torch.Tensor, fields: TokenFields) -> LossOutput:
        out = super().loss(logprobs_N, fields)
        if self.kind == "loss":
            return replace(out, per_token_N=out.per_token_N * math.nan)
        zero_N = logprobs_N - logprobs_N.detach()
        return replace(out, per_token_N=out.per_token_N + zero_N.sqrt())  # value 0, derivative infinite


def test_is_a_trainer_and_learns() -> None:
    """More advantage, more probability: the sign of everything, end to end."""
    trainer: Trainer = make_trainer()
    assert isinstance(trainer, PolicyTrainer)
    before = trainer.forward(SAMPLES, "policy")
    for _ in range(5):
        train_once(trainer)
    after = trainer.forward(SAMPLES, "policy")
    for i, sample in enumerate(SAMPLES):
        gain = float(after[i].sum() - before[i].sum())
        assert gain * ADVANTAGES[sample.id] > 0
    assert trainer.step == 5


def test_forward_is_zero_where_the_mask_is_and_bit_equal_twice() -> None:
    """The contract of forward, and F15."""
    trainer = make_trainer()
    first, second = trainer.forward(SAMPLES), trainer.forward(SAMPLES)
    for sample, a, b in zip(SAMPLES, first, second, strict=True):
        assert a.dtype == torch.float32 and a.shape == (len(sample.ids),)
        assert torch.equal(a == 0, torch.tensor(sample.mask) == 0)
        assert torch.equal(a, b)


def test_forward_equals_the_gradient_pass_bit_for_bit() -> None:
    """F4: proximal log-probabilities come from the same code and micro-batches, so the first ratio is exactly 1."""
    trainer = make_trainer(max_microbatch_tokens=16)
    scored = trainer.forward(SAMPLES)
    trainer.forward_backward(minibatch_of(), Reinforce(ADVANTAGES))
    last = trainer.last_logprobs()
    assert all(torch.equal(last[s.id], logprobs) for s, logprobs in zip(SAMPLES, scored, strict=True))


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_non_finite_raises_and_leaves_everything_untouched(kind: str) -> None:
    """I13, F58: the weights, the step count and the next step are as if the bad minibatch had never been."""
    trainer, twin = make_trainer(), make_trainer()
    train_once(trainer)
    train_once(twin)
    before = weights(trainer)
    broken = Broken(ADVANTAGES)
    object.__setattr__(broken, "kind", kind)
    with pytest.raises(NonFiniteError):
        trainer.forward_backward(minibatch_of(), broken)
        trainer.optim_step()
    assert same(weights(trainer), before)
    assert trainer.step == 1
    train_once(trainer)
    train_once(twin)
    assert same(weights(trainer), weights(twin))


def test_non_finite_weights_are_not_published() -> None:
    """I13: and the error names the tensor."""
    trainer = make_trainer()
    with torch.no_grad():
        trainer._model.model.norm.weight[3] = math.inf
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight"):
        trainer.publish()
    assert trainer.version == PolicyVersion(0, 0)


def test_versions_and_lineage() -> None:
    """Number +1 per publish; a resume opens a lineage and keeps the number."""
    trainer = make_trainer()
    assert trainer.publish().version == PolicyVersion(0, 1)
    trainer.set_lineage(2)
    update = trainer.publish()
    assert update.version == trainer.version == PolicyVersion(2, 2)
    assert update.tensors is None


@pytest.mark.parametrize("skip", [True, False])
def test_zero_gradient_moves_nothing_whether_skipped_or_computed(skip: bool) -> None:
    """Skipping is an optimisation: it must not change what a step does. Momentum alone moves no weight."""
    trainer = make_trainer(skip_zero_gradient=skip, weight_decay=0.1)
    train_once(trainer)
    before = weights(trainer)
    nothing = minibatch_of(advantages=dict.fromkeys(ADVANTAGES, 0.0))
    metrics = trainer.forward_backward(nothing, Reinforce(ADVANTAGES)) | trainer.optim_step()
    assert same(weights(trainer), before)
    assert (metrics["grad_norm"], metrics["num_empty_steps"], trainer.step) == (0.0, 1.0, 2)
    assert metrics["num_skipped_samples"] == (4 if skip else 0)


def test_gradients_of_several_minibatches_add_up() -> None:
    """forward_backward adds; optim_step clears."""
    once, twice = make_trainer(), make_trainer()
    once.forward_backward(minibatch_of(), Reinforce(ADVANTAGES))
    twice.forward_backward(minibatch_of(), Reinforce(ADVANTAGES))
    twice.forward_backward(minibatch_of(), Reinforce(ADVANTAGES))
    assert twice.optim_step()["grad_norm"] == pytest.approx(2 * once.optim_step()["grad_norm"], rel=1e-5)
    assert all(p.grad is None for p in twice._model.parameters())


def test_clipping_bounds_the_step() -> None:
    """The norm is global and reported before clipping; AdamW with eps 1 makes the step proportional to it."""
    moves = []
    for bound in (0.02, 0.01):
        trainer = make_trainer(max_grad_norm=bound, eps=1.0)
        before = weights(trainer)
        metrics = train_once(trainer)
        assert metrics["grad_norm"] > 0.02
        moves.append(sum(float((w - before[n]).square().sum()) for n, w in weights(trainer).items()) ** 0.5)
    assert moves[1] == pytest.approx(moves[0] / 2, rel=0.02)


def test_metrics_of_on_policy_tokens() -> None:
    """I5: the trainer's own log-probabilities as behaviour give ratio 1; the metric is about fresh tokens only."""
    trainer = make_trainer()
    scored = trainer.forward(SAMPLES)
    fresh = tuple(replace(s, behaviour_logprobs=tuple(lp.tolist())) for s, lp in zip(SAMPLES, scored, strict=True))
    metrics = trainer.forward_backward(minibatch_of(fresh), Reinforce(ADVANTAGES))
    assert metrics["max_ratio_error"] < 1e-6
    assert metrics["logprob_gap_max"] < 1e-6 and metrics["ratio_outside_share"] == 0.0
    assert metrics["num_trained_tokens"] == 12 and metrics["num_samples"] == 4
    assert metrics["mean_advantage"] == pytest.approx(0.0)
    trainer.optim_step()
    assert "max_ratio_error" not in trainer.forward_backward(minibatch_of(fresh), Reinforce(ADVANTAGES))
    trainer.publish()  # now the tokens are one version old
    assert "max_ratio_error" not in trainer.forward_backward(minibatch_of(fresh), Reinforce(ADVANTAGES))


def test_wrong_behaviour_logprobs_show() -> None:
    """I5, F5: a factor in the ratios is seen in every statistic, not only in the mean."""
    trainer = make_trainer()
    scored = trainer.forward(SAMPLES)
    off = tuple(
        replace(s, behaviour_logprobs=tuple((lp - 0.5 * torch.tensor(s.mask)).tolist()))
        for s, lp in zip(SAMPLES, scored, strict=True)
    )
    metrics = trainer.forward_backward(minibatch_of(off), Reinforce(ADVANTAGES))
    assert metrics["max_ratio_error"] == pytest.approx(math.exp(0.5) - 1, rel=1e-4)
    assert metrics["logprob_gap_p50"] == pytest.approx(0.5, rel=1e-4)
    assert metrics["ratio_outside_share"] == 1.0


def test_the_engines_gap_is_of_the_weights_that_sampled() -> None:
    """Issue 4: over all tokens that the batch's own version sampled, apart for replies that began under an older one
    (F76: their keys are old); tokens of other versions are about another policy and are left out."""
    trainer = make_trainer()
    scored = trainer.forward(SAMPLES)
    kinds = [(trainer.version, 1), (trainer.version, 1), (trainer.version, 2), (PolicyVersion(0, 7), 1)]
    shifts = [0.0, 0.01, 0.3, 5.0]
    samples = tuple(
        replace(
            sample,
            behaviour_logprobs=tuple((lp - shift * torch.tensor(sample.mask)).tolist()),
            versions=tuple(version if trained else None for trained in sample.mask),
            num_versions=num_versions,
        )
        for sample, lp, shift, (version, num_versions) in zip(SAMPLES, scored, shifts, kinds, strict=True)
    )
    metrics = trainer.forward_backward(minibatch_of(samples), Reinforce(ADVANTAGES))
    assert metrics["engine/gap_p99"] == metrics["engine/gap_max"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["engine/in_flight_gap_p99"] == pytest.approx(0.3, rel=1e-3)
    counts = [metrics[f"engine/num_{name}_tokens"] for name in ("gap", "in_flight_gap")]
    assert counts == [sum(s.num_trained for s in SAMPLES[:2]), SAMPLES[2].num_trained]
    assert metrics["logprob_gap_max"] == pytest.approx(5.0, rel=1e-3)
    trainer.optim_step()  # now the current policy has moved; the proximal one still is the version that sampled
    later = trainer.forward_backward(replace(minibatch_of(samples), proximal_logprobs=scored), Reinforce(ADVANTAGES))
    assert later["engine/gap_max"] == pytest.approx(0.01, rel=1e-3)
    assert "engine/gap_max" not in trainer.forward_backward(minibatch_of(samples), Reinforce(ADVANTAGES))


def test_nan_behind_the_mask_changes_nothing() -> None:
    """F58, F59: NaN and overflowing log-probabilities at mask 0 reach neither loss nor metric."""
    clean, dirty = make_trainer(), make_trainer()
    garbage = []
    for sample in SAMPLES:
        log = [math.nan, 1e30, -math.inf, *sample.behaviour_logprobs[3:]]
        garbage.append(replace(sample, behaviour_logprobs=tuple(log)))
    a = train_once(clean)
    b = train_once(dirty, minibatch_of(tuple(garbage)))
    assert a == b
    assert same(weights(clean), weights(dirty))


def test_reference_stays_what_the_run_started_from() -> None:
    """F62: equal at step 0, unchanged afterwards."""
    trainer = make_trainer(with_reference=True)
    start = trainer.forward(SAMPLES)
    assert all(torch.equal(a, b) for a, b in zip(start, trainer.forward(SAMPLES, "reference"), strict=True))
    train_once(trainer)
    assert all(torch.equal(a, b) for a, b in zip(start, trainer.forward(SAMPLES, "reference"), strict=True))
    assert not torch.equal(start[0], trainer.forward(SAMPLES)[0])
    with pytest.raises(ValueError, match="with_reference"):
        make_trainer().forward(SAMPLES, "reference")


def test_lora_trains_only_the_adapter_and_its_reference_is_the_base() -> None:
    """The base's weights stay bit-equal, and the reference costs no copy."""
    trainer = make_trainer(lora=LoraConfig(rank=4), with_reference=True)
    start, before = trainer.forward(SAMPLES), weights(trainer)
    for _ in range(3):
        train_once(trainer)
    after = weights(trainer)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and all("lora_" in name for name in changed)
    assert trainer._reference is trainer._loaded.base
    assert torch.equal(trainer.forward(SAMPLES, "reference")[0], start[0])
    assert not torch.equal(trainer.forward(SAMPLES)[0], start[0])


def test_bfloat16_accumulates_small_steps_in_the_masters() -> None:
    """Steps below bfloat16's resolution are not lost: they add up in float32 until they show."""
    trainer = make_trainer(dtype="bfloat16", learning_rate=1e-5)
    masters = trainer._weights.masters
    start = {name: m.detach().clone() for name, m in masters.items()}
    for _ in range(3):
        train_once(trainer)
    moved = max(float((m.detach() - start[name]).abs().max()) for name, m in masters.items())
    assert moved == pytest.approx(3e-5, rel=0.2)
    for name, parameter in trainer._model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter.detach(), masters[name].detach().to(torch.bfloat16))


def test_bfloat16_gradient_is_close_to_float32() -> None:
    """Same direction, gathered in float32 over several micro-batches."""
    exact, rounded = make_trainer(), make_trainer(dtype="bfloat16", max_microbatch_tokens=16)
    exact.forward_backward(minibatch_of(), Reinforce(ADVANTAGES))
    rounded.forward_backward(minibatch_of(), Reinforce(ADVANTAGES))
    for name, master in rounded._weights.masters.items():
        want = exact._weights.masters[name].grad
        assert master.grad is not None and master.grad.dtype == torch.float32 and want is not None
        assert float((master.grad - want).norm() / want.norm()) < 0.1
