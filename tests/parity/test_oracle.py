"""The scalar oracle against ALGORITHMS.md, against its own literals, and its gradients against central differences.

Guards issue 3, criterion 1: the oracle is what the implementation is measured with, so it must itself be able to fail.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import oracle as first_oracle
import oracle_advantages as adv
import oracle_cases as cases
import oracle_corrections as cor
import oracle_losses as los
import oracle_objectives as obj
import oracle_sequences as seq
import pytest
from oracle_core import AGGREGATIONS, Batch, Nested, added, reduce_sequences, reduce_terms, shares, weighted
from oracle_inputs import BATCH, GOLDEN, LOGITS, OLD_VALUES, ROLLOUT, TARGETS, TEACHER_LOGITS, TOKEN_BATCH
from oracle_vectors import EXPECTED

GOLDEN_COLUMNS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
STEP = 1e-6


def assert_same(found: Any, expected: Any, relative: float = 1e-12, where: str = "") -> None:
    """Equal structure, equal keys, floats to ``relative`` (absolute below 1)."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            assert_same(found[key], expected[key], relative, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for k, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, relative, f"{where}[{k}]")
    else:
        assert abs(found - expected) <= relative * max(1.0, abs(expected)), (where, found, expected)


def columns(terms: Any, batch: Batch = GOLDEN) -> list[float]:
    return [reduce_terms(terms, batch.mask, how, batch.max_length)[0] for how in GOLDEN_COLUMNS]


# ------------------------------------------------------------------------------------------ ALGORITHMS.md


def icepop(high: float) -> Any:
    return weighted(obj.ppo(GOLDEN, 0.2, 0.28), cor.rho_weights(GOLDEN, "token", "mask", 0.95, high))


def tis() -> Any:
    return weighted(obj.ppo(GOLDEN, 0.2, 0.28), cor.rho_weights(GOLDEN, "token", "cap", high=1.05))


GOLDEN_ROWS: dict[str, tuple[Callable[[], Any], list[float], int]] = {
    "ppo": (lambda: obj.ppo(GOLDEN, 0.2, 0.28), [-0.038030, 0.219455, -0.095074, -0.023769], 6),
    "dual": (lambda: obj.ppo(GOLDEN, 0.2, 0.28, 1.5), [-0.140780, 0.091016, -0.351951, -0.087988], 6),
    "dual inactive": (lambda: obj.ppo(GOLDEN, 0.2, 0.28, 3.0), [-0.038030, 0.219455, -0.095074, -0.023769], 6),
    "cispo": (lambda: obj.cispo(GOLDEN, 0.2, 0.28), [0.502809, 0.339341, 1.257023, 0.314256], 6),
    "sapo": (lambda: obj.sapo(GOLDEN), [-0.362780, 0.092457, -0.906950, -0.226738], 6),
    "decoupled": (lambda: cor.decoupled(GOLDEN, 0.2, 0.28), [-0.048182, 0.199297, -0.120455, -0.030114], 6),
    "tis": (tis, [-0.039402, 0.206508, -0.098506, -0.024626], 6),
    "icepop zero": (lambda: icepop(1.06), [0.0, 0.087606, 0.0, 0.0], 6),
    "icepop": (lambda: icepop(1.12), [-0.180967483607, -0.063200311641, -0.452418709018, -0.113104677254], 12),
    "cispo lower": (
        lambda: obj.cispo(GOLDEN, 0.1, 0.28),
        [0.535317091808, 0.366430909840, 1.338292729519, 0.334573182380],
        12,
    ),
    "dppo": (
        lambda: obj.dppo_tv(GOLDEN, 0.1, 0.1),
        [0.246999371344, 0.114140015491, 0.617498428359, 0.154374607090],
        12,
    ),
}


@pytest.mark.parametrize("name", GOLDEN_ROWS)
def test_golden_losses(name: str) -> None:
    """ALGORITHMS.md, golden vectors: every row with four columns, to the digits given there."""
    make, expected, digits = GOLDEN_ROWS[name]
    assert columns(make()) == pytest.approx(expected, abs=0.5001 * 10**-digits)


def test_golden_sequences() -> None:
    """ALGORITHMS.md: r, rho, GSPO (two bounds), GMPO, OPSM, sequence and geometric rho."""
    close = lambda x: pytest.approx(x, abs=0.5001e-6)  # noqa: E731
    ratio = [[-x for x in row] for row in obj.surrogate(replace(GOLDEN, advantage=[[1.0] * 3, [1.0] * 2])).value]
    assert ratio[0] == close([1.105171, 1.648721, 0.818731]) and ratio[1] == close([1.0, 2.013753])
    rho = cor.rho_weights(GOLDEN, mode="none")
    assert rho[0] == close([0.951229, 0.904837, 1.105171]) and rho[1] == close([1.051271, 0.904837])
    assert seq.sequence_ratios(GOLDEN) == close([1.142631, 1.419068])
    for low, high, values, average in (
        (0.2, 0.28, [-1.142631, 1.419068], 0.138218),
        (3e-4, 4e-4, [-1.0004, 1.419068], 0.209334),
    ):
        terms = seq.gspo_sequence(GOLDEN, low, high)
        assert terms.value == close(values) and reduce_sequences(terms, GOLDEN.mask)[0] == close(average)
        assert columns(seq.gspo(GOLDEN, low, high))[1] == close(average)
    gmpo = seq.gmpo(GOLDEN)
    assert gmpo.value == close([-1.105171, 1.419068]) and reduce_sequences(gmpo, GOLDEN.mask)[0] == close(0.156948)
    for level, values in (("sequence", [0.951229, 0.951229]), ("geometric", [0.983471, 0.975310])):
        assert [row[0] for row in cor.rho_weights(GOLDEN, level, "none")] == close(values)
    assert [cor.opsm_shift(GOLDEN, i) for i in (0, 1)] == close([-0.133333, -0.35])
    assert cor.rho_weights(GOLDEN, "token", "reject", 0.95, 1.06) == [[1, 0, 0], [1, 0]]


def test_golden_kl() -> None:
    """ALGORITHMS.md: k1, k2, k3 under the token mean; k3+ has k3's value."""
    for kind, expected in (("k1", 0.12), ("k2", 0.014), ("k3", 0.013240), ("k3+", 0.013240)):
        assert columns(los.kl_loss(GOLDEN, kind))[0] == pytest.approx(expected, abs=0.5001e-6)


def test_golden_advantages() -> None:
    """ALGORITHMS.md: the advantages of R = [1, 0, 0, 1, 1], GAE and overlong shaping."""
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    for found, first, second in (
        (adv.group_mean_std(rewards), 0.730295, -1.095443),
        (adv.group_mean_std(rewards, unbiased=False), 0.816495, -1.224742),
        (adv.group_mean(rewards), 0.4, -0.6),
        (adv.rloo(rewards), 0.5, -0.75),
        (adv.maxrl(rewards), 0.666667, -1.0),
    ):
        assert found == pytest.approx([first, second, second, first, first], abs=0.5001e-6)
    assert adv.gae([0, 0, 1], [0.2, 0.4, 0.6], [1, 1, 1])[0] == pytest.approx([0.751, 0.58, 0.4], abs=1e-12)
    assert [adv.overlong_shaping(n, 20480, 4096) for n in (16384, 18432, 20480, 20481)] == [0.0, -0.5, -1.0, -1.0]


# ------------------------------------------------------------------------------------------------ literals


def test_every_vector_has_its_literal() -> None:
    """A vector without a literal, or a literal nobody computes, guards nothing."""
    assert sorted(EXPECTED) == sorted(cases.names())


@pytest.mark.parametrize("name", cases.names())
def test_literals(name: str) -> None:
    """A regression in the oracle shows against the stored digits."""
    assert_same(cases.compute(name), EXPECTED[name], where=name)


# ----------------------------------------------------------------------------------------------- gradients


def central_difference(loss: Callable[[Nested], float], point: Nested, mask: list[list[int]]) -> Nested:
    out = [[0.0] * len(row) for row in point]
    for i, row in enumerate(mask):
        for t, m in enumerate(row):
            if m:
                moved = [list(r) for r in point]
                moved[i][t] = point[i][t] + STEP
                up = loss(moved)
                moved[i][t] = point[i][t] - STEP
                out[i][t] = (up - loss(moved)) / (2 * STEP)
    return out


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("name", cases.objectives())
def test_gradients_of_objectives(name: str, how: str) -> None:
    """The written derivative is the derivative with the detached parts frozen: only ``live`` moves."""
    batch, f = cases.objectives()[name]
    gradient = reduce_terms(f(batch, None), batch.mask, how, batch.max_length)[1]
    numeric = central_difference(
        lambda live: reduce_terms(f(batch, live), batch.mask, how, batch.max_length)[0], batch.new, batch.mask
    )
    assert_same(numeric, gradient, 2e-8, name)
    assert any(g != 0 for row in gradient for g in row)


@pytest.mark.parametrize("name", cases.SEQUENCE_OBJECTIVES)
def test_gradients_of_sequence_objectives(name: str) -> None:
    """As above, for losses of whole sequences."""
    f = cases.SEQUENCE_OBJECTIVES[name]
    gradient = reduce_sequences(f(BATCH, None), BATCH.mask)[1]
    numeric = central_difference(lambda live: reduce_sequences(f(BATCH, live), BATCH.mask)[0], BATCH.new, BATCH.mask)
    assert_same(numeric, gradient, 2e-8, name)


def test_gradients_of_whole_distributions() -> None:
    """Entropy and both KLs by each logit; the entropy bonus; the value loss by V; distillation by log pi."""
    for k, z in enumerate(LOGITS):
        for f in (
            los.entropy,
            lambda x, k=k: los.reverse_kl(x, TEACHER_LOGITS[k]),
            lambda x, k=k: los.forward_kl(x, TEACHER_LOGITS[k]),
        ):
            numeric = central_difference(lambda p, f=f: f(p[0])[0], [z], [[1] * 4])[0]
            assert_same(numeric, f(z)[1], 2e-8)
    mask = [[1, 0, 1]]
    bonus = lambda rows: los.entropy_bonus([rows], mask, 0.01)  # noqa: E731
    assert_same(central_difference(lambda p: bonus(p)[0], LOGITS, [[1] * 4] * 3), bonus(LOGITS)[1][0], 2e-8)
    for epsilon in (0.2, None):
        value = partial(los.value_loss, old_values=OLD_VALUES, targets=TARGETS, mask=BATCH.mask, epsilon=epsilon)
        numeric = central_difference(lambda v, f=value: f(v)[0], ROLLOUT.values, BATCH.mask)
        assert_same(numeric, value(ROLLOUT.values)[1], 2e-8)
    weights = cases.STREAM_WEIGHTS
    pull = los.distillation(BATCH.new, BATCH.ref, weights, BATCH.mask)[1]
    numeric = central_difference(
        lambda live: los.distillation(BATCH.new, BATCH.ref, weights, BATCH.mask, live)[0], BATCH.new, BATCH.mask
    )
    assert_same(numeric, pull, 2e-8)
    squared = lambda p: los.distillation_k2(p, BATCH.ref, weights, BATCH.mask)  # noqa: E731
    assert_same(central_difference(lambda p: squared(p)[0], BATCH.new, BATCH.mask), squared(BATCH.new)[1], 2e-8)
    assert_same(squared(BATCH.new)[1], pull)  # the same gradient, whatever the value


def test_gradient_facts() -> None:
    """ALGORITHMS.md, gradient checks: clipped PPO 0, clipped CISPO not 0, GSPO -s A/(B |o|) and 0 where clipped."""
    assert obj.ppo(BATCH, 0.2, 0.28).slope[0][1] == 0 and obj.cispo(BATCH, 0.2, 0.28).slope[0][1] == -1.28 * 1.25
    gradient = reduce_terms(seq.gspo(BATCH, 0.1, 0.28), BATCH.mask, "seq_mean_token_mean", 6)[1]
    s = seq.sequence_ratios(BATCH)
    assert gradient[0][0] == pytest.approx(-s[0] * 1.25 / (7 * 4), rel=1e-12)
    assert gradient[1] == [0.0] and gradient[4] == [0.0] * 4  # too high with A > 0, too low with A < 0
    assert_same(gradient, reduce_sequences(seq.gspo_sequence(BATCH, 0.1, 0.28), BATCH.mask)[1])


# ------------------------------------------------------------------------------------- what a vector must do


FREE = 1e9
KNOBS: dict[str, list[Callable[[Batch], Any]]] = {
    "ppo": [
        lambda b: obj.ppo(b, FREE, 0.28),
        lambda b: obj.ppo(b, 0.2, FREE),
        lambda b: obj.ppo(b, 0.2, 0.2),
        lambda b: obj.ppo(b, 0.28, 0.28),
    ],
    "dual_clip": [lambda b: obj.ppo(b, 0.2, 0.28)],
    "cispo": [lambda b: obj.cispo(b, None, 0.28), lambda b: obj.cispo(b, 0.2, FREE)],
    "truncated_pg": [lambda b: obj.cispo(b, None, FREE), lambda b: obj.cispo(b, 0.2, 0.0)],
    "topr": [lambda b: obj.topr(b, True), lambda b: obj.reinforce(b)],
    "topr_token": [lambda b: obj.reinforce(b)],
    "aipo": [lambda b: obj.aipo(b, FREE)],
    "sapo": [lambda b: obj.sapo(b, 1.0, 1.0), lambda b: obj.sapo(b, 1.05, 1.05)],
    "dppo_tv": [
        lambda b: obj.dppo_tv(b, FREE, 0.1),
        lambda b: obj.dppo_tv(b, 0.1, FREE),
        lambda b: obj.dppo_tv(b, 0.1, 0.1, FREE),
    ],
    "dppo_tv_asymmetric": [lambda b: obj.dppo_tv(b, 0.1, 0.125), lambda b: obj.dppo_tv(b, 0.15, 0.1)],
    "dppo_tv_penalised": [
        lambda b: obj.dppo_tv_penalised(b, 0.1, 0.1, 0.0),
        lambda b: obj.dppo_tv_penalised(b, FREE, FREE, 0.01),
    ],
    "dppo_kl": [
        lambda b: obj.dppo_kl(b, FREE),
        lambda b: obj.dppo_kl(b, 0.0),
        lambda b: obj.dppo_kl(b, 0.034, FREE),
        lambda b: obj.dppo_tv(b),
    ],
    "gspo": [lambda b: seq.gspo(b, FREE, 0.28), lambda b: seq.gspo(b, 0.1, FREE), lambda b: obj.ppo(b, 0.1, 0.28)],
    "gspo_capped": [lambda b: seq.gspo(b, 0.1, 0.28)],
    "clip_cov": [lambda b: obj.ppo(b, 0.2, 0.28), lambda b: seq.clip_cov(b, [(0, 0)], 0.2, 0.28)],
    "kl_cov": [
        lambda b: obj.surrogate(b),
        lambda b: seq.kl_cov(b, 0.2, 0.5),
        lambda b: seq.kl_cov(b, 0.25, 1.0),
    ],
    "m2po": [
        lambda b: seq.m2po(b, FREE),
        lambda b: seq.m2po(b, 0.12),
        lambda b: seq.m2po(b, 0.1, behaviour=False),
    ],
    "decoupled": [lambda b: obj.ppo(b, 0.2, 0.28)],
    "decoupled_capped": [lambda b: cor.decoupled(b, 0.2, 0.28)],
    "kl_loss_k3": [lambda b: los.kl_loss(b, "k3", True), lambda b: los.kl_loss(b, "k2")],
}


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_binds(name: str) -> None:
    """A bound, cap or term that could be taken out of a vector unnoticed is not tested by it: every one moves the loss
    under all five aggregations AND the slope."""
    batch, _ = cases.objectives()[name]
    for without in KNOBS[name]:
        changed = cases.describe(without(batch), batch)
        for key, value in EXPECTED[name].items():
            if key == "slope":
                assert any(a != b for p, q in zip(changed[key], value, strict=True) for a, b in zip(p, q, strict=True))
            else:
                assert abs(changed[key] - value) > 1e-6, key


def test_every_branch_of_the_masks() -> None:
    """Ratio below, inside, above the clip for both signs; DPPO keeps and drops for both signs; each correction keeps,
    changes and drops something; OPSM spares a positive sequence that has drifted as far."""
    zones = {
        (math.copysign(1, BATCH.advantage[i][t]), (r > 0.8) + (r > 1.28))
        for i, t in BATCH.cells()
        if BATCH.advantage[i][t]
        for r in [math.exp(BATCH.new[i][t] - BATCH.old[i][t])]
    }
    assert len(zones) == 6
    for keep in (lambda i, t: obj.tv_keep(BATCH, i, t, 0.1, 0.1), lambda i, t: obj.kl_keep(BATCH, i, t, 0.034)):
        seen = {(BATCH.advantage[i][t] > 0, keep(i, t)) for i, t in BATCH.cells() if BATCH.advantage[i][t]}
        assert len(seen) == 4
    for name in ("mis", "icepop", "sequence_mask", "geometric_mask"):
        weights = EXPECTED[name]
        flat = {weights[i][t] for i, t in BATCH.cells()}
        assert 0.0 in flat and any(0 < w < 1 for w in flat) and any(w > 1 for w in flat), name
    for level, low, high in (("token", 0.5, 2.0), ("sequence", 0.87, 1.7), ("geometric", 0.9, 1.2)):
        values = [w for row in cor.rho_weights(BATCH, level, "none") for w in row if w]
        assert min(values) < low and max(values) > high
    assert EXPECTED["veto"] == [[0.0] * 3, [1.0] * 2, [1.0] * 2, [0.0] * 2, [1.0] * 2]
    assert [row[-2] for row in EXPECTED["opsm"] if len(row) > 1] == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert cor.opsm_shift(BATCH, 5) > 0.1 < cor.opsm_shift(BATCH, 4)
    assert EXPECTED["sequence_clamped"][2][0] == math.exp(20) and EXPECTED["sequence_clamped"][3][0] == math.exp(-20)
    assert EXPECTED["clip_cov_candidates"] == [list(c) for c in cases.CLIP_COV_CHOSEN]
    assert seq.num_selected(BATCH, 0.25) == 4 and seq.num_selected(BATCH, 1e-4) == 1


def test_masked_tokens_do_not_exist() -> None:
    """FAILURES.md 58, 59, 64: NaN in every masked slot changes nothing, in no objective, weight or advantage."""

    def poisoned(rows: Nested, mask: list[list[int]]) -> Nested:
        return [[v if m else math.nan for v, m in zip(*pair, strict=True)] for pair in zip(rows, mask, strict=True)]

    def poison(b: Batch) -> Batch:
        fields = {k: poisoned(getattr(b, k), b.mask) for k in ("new", "old", "roll", "ref", "advantage")}
        return replace(b, **fields)

    for name, (batch, f) in cases.objectives().items():
        assert_same(cases.describe(f(poison(batch), None), batch), EXPECTED[name], where=name)
    for name, (batch, f) in cases.WEIGHTS.items():
        assert_same(f(poison(batch)), EXPECTED[name], where=name)
    for name, f in cases.SEQUENCE_OBJECTIVES.items():
        assert_same(f(poison(BATCH), None).slope, EXPECTED[name]["slope"], where=name)
    assert_same(adv.whiten(poison(TOKEN_BATCH).advantage, BATCH.mask), EXPECTED["whiten"])
    b = poison(BATCH)
    assert_same(adv.reinforce_pp(ROLLOUT.rewards, b.old, b.ref, b.mask, 0.1, 0.9), EXPECTED["reinforce_pp_advantage"])
    values = poisoned(ROLLOUT.values, BATCH.mask)
    paid = poisoned(adv.token_rewards(ROLLOUT.rewards, b.old, b.ref, b.mask, 0.1), BATCH.mask)
    for i, row in enumerate(BATCH.mask):
        assert_same(list(adv.gae(paid[i], values[i], row, 0.97, 0.9)), EXPECTED["gae"][i])


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_two_oracles_agree(how: str) -> None:
    """The first oracle (oracle.py) and this one were written apart; where both have a formula they give one number."""
    case = first_oracle.CASE
    mask = [[1] * len(row) for row in case.new]
    batch = Batch(case.new, case.old, case.roll, case.ref, case.advantage, mask, case.max_length)
    capped = ("truncate", 0.0, 1.05)
    for options, terms in (
        ({"objective": "ppo", "clip_high": 0.28, "dual": 3.0}, obj.ppo(batch, 0.2, 0.28, 3.0)),
        ({"objective": "cispo", "clip_high": 0.28}, obj.cispo(batch, 0.2, 0.28)),
        ({"objective": "reinforce"}, obj.reinforce(batch)),
        ({"objective": "ppo", "level": "sequence", "clip_high": 0.28}, seq.gspo(batch, 0.2, 0.28)),
        (
            {"objective": "ppo", "correction": capped},
            weighted(obj.ppo(batch), cor.rho_weights(batch, "token", "cap", high=1.05)),
        ),
        *(
            ({"objective": "ppo", "kl": (0.1, kind)}, added(obj.ppo(batch), los.kl_loss(batch, kind), 0.1))
            for kind in los.KL_ESTIMATORS
        ),
    ):
        loss, gradient = first_oracle.loss_and_gradient(case, aggregation=how, **options)
        ours = reduce_terms(terms, mask, how, case.max_length)
        assert_same([loss, gradient], list(ours), where=str(options))


def test_shares() -> None:
    """Token weights add up to what each aggregation promises; an untrained sequence is not counted."""
    mask = [[1, 0, 1], [0, 0], [1]]
    totals = {how: math.fsum(w for row in shares(mask, how, 5) for w in row) for how in AGGREGATIONS}
    assert totals == pytest.approx(
        {
            "token_mean": 1.0,
            "seq_mean_token_mean": 1.0,
            "seq_mean_token_sum": 1.5,
            "seq_mean_token_sum_norm": 0.3,
            "token_sum": 3.0,
        }
    )


def test_advantage_facts() -> None:
    """FAILURES.md 48, 49, 66: equal rewards give exactly 0, also for 0.35; a negative mean is refused by MaxRL."""
    assert adv.group_mean_std([0.35] * 7) == [0.0] * 7 and adv.maxrl([0.0] * 3) == [0.0] * 3
    with pytest.raises(ValueError, match="mean >= 0"):
        adv.maxrl([-1.0, 0.0])
    white = [EXPECTED["whiten"][i][t] for i, t in BATCH.cells()]
    assert math.fsum(white) == pytest.approx(0, abs=1e-12) and adv.std(white) == pytest.approx(1, abs=1e-12)
    paid = adv.token_rewards(ROLLOUT.rewards, BATCH.old, BATCH.ref, BATCH.mask, 0.0)
    assert [math.fsum(row) for row in paid] == ROLLOUT.rewards  # FAILURES.md 65


def test_oracle_is_plain_python() -> None:
    """No torch, no numpy: the standard library and the oracle's own files."""
    allowed = {"__future__", "ast", "collections", "dataclasses", "math", "pathlib", "textwrap", "typing"}
    for path in Path(__file__).parent.glob("oracle*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed or name.startswith("oracle"), (path.name, name)
