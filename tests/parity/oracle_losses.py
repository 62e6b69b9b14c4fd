"""Terms beside the policy term: KL, entropy, value loss, cross-entropy and distillation streams.

``live`` as in oracle_core: where the gradient flows. Gradients by logits are lists over the vocabulary.
"""

from __future__ import annotations

import math

from oracle_core import Batch, Mask, Nested, Terms, clip, per_token

KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")


def kl_estimate(estimator: str, logprob: float, reference: float, frozen: float | None = None) -> tuple[float, float]:
    """Value and slope by ``logprob`` of k1 = x, k2 = x^2/2, k3 = exp(-x) - 1 + x with x = log pi - log pi_ref.

    'k3+' (verl, straight-through): the value of k3 and the gradient of k2: k3(sg) + k2 - sg(k2); ``frozen`` is the
    detached log-probability.
    """
    x = logprob - reference
    if estimator == "k1":
        return x, 1.0
    if estimator == "k2":
        return x**2 / 2, x
    if estimator == "k3":
        return math.exp(-x) - 1 + x, 1 - math.exp(-x)
    still = (logprob if frozen is None else frozen) - reference
    return math.exp(-still) - 1 + still + x**2 / 2 - still**2 / 2, x


def kl_loss(batch: Batch, estimator: str, off_policy: bool = False, live: Nested | None = None) -> Terms:
    """KL as a loss. ``off_policy`` (DeepSeek-V3.2): times r = pi/pi_old WITH its gradient: slope = r k + r k'."""
    new = live or batch.new

    def term(i: int, t: int) -> tuple[float, float]:
        value, slope = kl_estimate(estimator, new[i][t], batch.ref[i][t], batch.new[i][t])
        if off_policy:
            r = math.exp(new[i][t] - batch.old[i][t])
            value, slope = r * value, r * value + r * slope
        return value, slope

    return per_token(batch, term)


# ---------------------------------------------------------------------------------------- whole distributions


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    log_sum = top + math.log(math.fsum(math.exp(z - top) for z in logits))
    return [z - log_sum for z in logits]


def entropy(logits: list[float]) -> tuple[float, list[float]]:
    """H = logsumexp(z) - sum p z, and dH/dz_j = -p_j (log p_j + H)."""
    logs = log_softmax(logits)
    value = -math.fsum(math.exp(x) * x for x in logs)
    return value, [-math.exp(x) * (x + value) for x in logs]


def entropy_bonus(
    logits: list[list[list[float]]], mask: Mask, coefficient: float
) -> tuple[float, list[list[list[float]]]]:
    """-c * mean H over all trained tokens, and its gradient by the logits."""
    num_tokens = sum(sum(row) for row in mask)
    total, gradient = [], []
    for rows, marks in zip(logits, mask, strict=True):
        gradient.append([[0.0] * len(z) for z in rows])
        for t, m in enumerate(marks):
            if m:
                value, slope = entropy(rows[t])
                total.append(value)
                gradient[-1][t] = [-coefficient * s / num_tokens for s in slope]
    return -coefficient * math.fsum(total) / num_tokens, gradient


def reverse_kl(student: list[float], teacher: list[float]) -> tuple[float, list[float]]:
    """KL(student || teacher) of two logit vectors; d/dz_j = p_j (log p_j - log q_j - KL)."""
    log_p, log_q = log_softmax(student), log_softmax(teacher)
    value = math.fsum(math.exp(a) * (a - b) for a, b in zip(log_p, log_q, strict=True))
    return value, [math.exp(a) * (a - b - value) for a, b in zip(log_p, log_q, strict=True)]


def forward_kl(student: list[float], teacher: list[float]) -> tuple[float, list[float]]:
    """KL(teacher || student) of two logit vectors; d/dz_j of the student = p_j - q_j."""
    log_p, log_q = log_softmax(student), log_softmax(teacher)
    value = math.fsum(math.exp(b) * (b - a) for a, b in zip(log_p, log_q, strict=True))
    return value, [math.exp(a) - math.exp(b) for a, b in zip(log_p, log_q, strict=True)]


# -------------------------------------------------------------------------------------------- value function


def value_loss(
    values: Nested, old_values: Nested, targets: Nested, mask: Mask, epsilon: float | None
) -> tuple[float, Nested]:
    """1/2 max((V - G)^2, (clip(V, Vo - eps, Vo + eps) - G)^2), token mean; gradient by V. ``None``: no clip."""
    num_tokens = sum(sum(row) for row in mask)
    losses, gradient = [], [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        for t, m in enumerate(row):
            if not m:
                continue
            v, g = values[i][t], targets[i][t]
            loss, slope = 0.5 * (v - g) ** 2, v - g
            if epsilon is not None:
                bounded = clip(v, old_values[i][t] - epsilon, old_values[i][t] + epsilon)
                if 0.5 * (bounded - g) ** 2 > loss:  # only a clipped V can be worse, and it has no gradient
                    loss, slope = 0.5 * (bounded - g) ** 2, 0.0
            losses.append(loss)
            gradient[i][t] = slope / num_tokens
    return math.fsum(losses) / num_tokens, gradient


# --------------------------------------------------------------------------------------------------- streams


def cross_entropy(logprobs: Nested, weights: Nested, mask: Mask) -> tuple[float, Nested]:
    """-sum w log pi / N over the stream's own N trained tokens (weights are NOT in the denominator)."""
    num_tokens = sum(sum(row) for row in mask)
    gradient = [
        [-w / num_tokens if m else 0.0 for w, m in zip(*pair, strict=True)] for pair in zip(weights, mask, strict=True)
    ]
    total = math.fsum(-weights[i][t] * logprobs[i][t] for i, row in enumerate(mask) for t, m in enumerate(row) if m)
    return total / num_tokens, gradient


def distillation(
    logprobs: Nested, teacher: Nested, weights: Nested, mask: Mask, live: Nested | None = None
) -> tuple[float, Nested]:
    """On-policy distillation from the teacher's log-probabilities of the student's own tokens: policy gradient with
    the per-token advantage sg(log pi_teacher - log pi): -w sg(log pi_T - log pi) log pi / N.

    Its gradient, w (log pi - log pi_T) / N, is that of k2 towards the teacher (``distillation_k2``): the unbiased
    on-policy gradient of the reverse KL.
    """
    new = live or logprobs
    num_tokens = sum(sum(row) for row in mask)
    total, gradient = [], [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        for t, m in enumerate(row):
            if m:
                slope = -weights[i][t] * (teacher[i][t] - logprobs[i][t])
                total.append(slope * new[i][t])
                gradient[i][t] = slope / num_tokens
    return math.fsum(total) / num_tokens, gradient


def distillation_k2(logprobs: Nested, teacher: Nested, weights: Nested, mask: Mask) -> tuple[float, Nested]:
    """w/2 (log pi - log pi_T)^2 / N: another value, the same gradient as ``distillation``."""
    num_tokens = sum(sum(row) for row in mask)
    total, gradient = [], [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        for t, m in enumerate(row):
            if m:
                x = logprobs[i][t] - teacher[i][t]
                total.append(weights[i][t] * x**2 / 2)
                gradient[i][t] = weights[i][t] * x / num_tokens
    return math.fsum(total) / num_tokens, gradient


def streams(parts: list[tuple[float, float, Nested]]) -> tuple[float, list[Nested]]:
    """Streams share a pack, never a denominator: sum of coefficient * loss, each already divided by its own count."""
    loss = math.fsum(coefficient * value for coefficient, value, _ in parts)
    return loss, [[[coefficient * g for g in row] for row in gradient] for coefficient, _, gradient in parts]
