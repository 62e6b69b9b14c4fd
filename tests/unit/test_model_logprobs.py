"""Log-probabilities and entropies in chunks, against plain formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headrace.model.head import OutputHead, output_head
from headrace.model.logprobs import score_hidden, token_logprobs
from headrace.model.packing import PackedRow, pack
from headrace.testing import make_sample, tiny_model
from headrace.types import Sample

CPU = torch.device("cpu")
V, D = 23, 6


def packed(samples: list[Sample], dtype: torch.dtype = torch.float64) -> PackedRow:
    return pack(list(enumerate(samples)), share_prompts=True, dtype=dtype, device=CPU)


def kept(*sets: tuple[int, ...] | None) -> tuple[tuple[int, ...] | None, ...]:
    return (None, None, *sets)


SAMPLES = [
    make_sample([1, 2], [3, 4, 5], member=0),
    make_sample([1, 2], [3, 6], member=1),
    make_sample([1, 2], [7, 8, 9], member=2, temperature=0.6),
    make_sample([1, 2], [3, 4, 5], member=3, kept_ids=kept((3, 4, 11), (4,), None)),
    make_sample([1, 2], [10, 11], member=4, temperature=0.6, kept_ids=kept((10, 3), (12, 11, 3, 4, 5))),
]


def expected(hidden_UD: torch.Tensor, head: OutputHead, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Straight from the docstring's formulas, one token at a time, with autograd."""
    logprobs, entropies = [], []
    for n in range(len(row.target_N)):
        logits = head.weight_VD @ hidden_UD[row.row_N[n]]
        if head.bias_V is not None:
            logits = logits + head.bias_V
        logits = logits * head.scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        logits = logits / row.temperature_U[row.row_N[n]]
        ids = None if row.kept_N is None else row.kept_N[n]
        support = torch.arange(V) if ids is None else torch.tensor(ids)
        log_p = logits[support] - logits[support].logsumexp(0)
        logprobs.append(log_p[(support == row.target_N[n]).nonzero()[0, 0]])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def make_head(**options: Any) -> OutputHead:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(V, generator=generator, dtype=torch.float64, requires_grad=True)
    return OutputHead(weight, bias if options.pop("bias", False) else None, **options)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 1000])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"scale": 0.3}, {"softcap": 2.0, "scale": 1.5}])
def test_values_and_gradients_equal_the_plain_formulas(options: dict[str, Any], chunk: int) -> None:
    """I4: chunk borders, last chunks of any size, temperatures, kept ids, heads with bias, scale and soft cap."""
    row = packed(SAMPLES)
    head = make_head(**options)
    hidden = torch.randn(len(row.predictor_U), D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    hidden.requires_grad_()
    weights = torch.randn(2, len(row.target_N), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaves = [hidden, head.weight_VD] + ([] if head.bias_V is None else [head.bias_V])

    want = expected(hidden, head, row)
    want_grads = torch.autograd.grad((weights[0] * want[0] + weights[1] * want[1]).sum(), leaves)
    have = score_hidden(hidden, head, row, max_logit_tokens=chunk)
    have_grads = torch.autograd.grad((weights[0] * have[0] + weights[1] * have[1]).sum(), leaves)
    for a, b in zip((*have, *have_grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradient_of_logprobs_alone() -> None:
    """The usual case: nothing uses the entropies."""
    row = packed(SAMPLES)
    head = make_head()
    hidden = torch.randn(len(row.predictor_U), D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    want = torch.autograd.grad(expected(hidden, head, row)[0].sum(), head.weight_VD)[0]
    have = torch.autograd.grad(score_hidden(hidden, head, row, max_logit_tokens=3)[0].sum(), head.weight_VD)[0]
    torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)


def test_one_chunk_of_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory never holds [T, V], and the last chunk is not computed twice."""
    rows: list[int] = []
    linear = torch.nn.functional.linear

    def watched(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(hidden))
        return linear(hidden, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    row = packed(SAMPLES)
    assert len(row.predictor_U) == 7
    hidden = torch.randn(7, D, dtype=torch.float64)
    logprobs, _ = score_hidden(hidden, make_head(), row, max_logit_tokens=3)
    assert rows == [3, 3, 1]
    logprobs.sum().backward()
    assert rows == [3, 3, 1, 3, 3]


def test_temperature_golden_vector() -> None:
    """T39: logits [2, 1, 0], sampled index 0 at 0.6 has -0.20257; scored at 1 it would be -0.40761."""
    head = OutputHead(torch.tensor([[2.0], [1.0], [0.0]]), None)
    for temperature, logprob in ((0.6, -0.20257), (1.0, -0.40761)):
        row = packed([make_sample([1, 2], [0], temperature=temperature)], torch.float32)
        found, _ = score_hidden(torch.ones(1, 1), head, row, max_logit_tokens=10)
        assert float(found) == pytest.approx(logprob, abs=5e-6)


def test_kept_ids_renormalise() -> None:
    """F7: the ratio against scoring over all ids is exactly the kept mass."""
    head = OutputHead(torch.tensor([[2.0], [1.0], [0.0], [-1.0]]), None)
    everything, _ = score_hidden(
        torch.ones(1, 1), head, packed([make_sample([1, 2], [0])], torch.float32), max_logit_tokens=9
    )
    sample = make_sample([1, 2], [0], kept_ids=kept((0, 1)))
    truncated, _ = score_hidden(torch.ones(1, 1), head, packed([sample], torch.float32), max_logit_tokens=9)
    kept_mass = float(torch.tensor([2.0, 1.0, 0.0, -1.0]).softmax(0)[:2].sum())
    assert math.exp(float(everything) - float(truncated)) == pytest.approx(kept_mass, rel=1e-5)


def test_sampled_id_outside_its_kept_set_is_an_error() -> None:
    """Kept sets that are one token out of step would give log-probabilities above 0."""
    row = packed([make_sample([1, 2], [0], kept_ids=kept((1, 2)))])
    with pytest.raises(ValueError, match="kept-id set"):
        score_hidden(torch.ones(1, D, dtype=torch.float64), make_head(), row, max_logit_tokens=9)


def test_extreme_logits_stay_finite() -> None:
    """F58: an overflow cannot happen, and certain tokens have log-probability 0 and entropy 0."""
    head = OutputHead(torch.tensor([[3e4], [-3e4], [0.0]]), None)
    for target, logprob in ((0, 0.0), (1, -6e4)):
        row = packed([make_sample([1, 2], [target])], torch.float32)
        hidden = torch.ones(1, 1, requires_grad=True)
        found, entropy = score_hidden(hidden, head, row, max_logit_tokens=9)
        (found + entropy).sum().backward()
        assert float(found.detach()) == logprob
        assert float(entropy.detach()) == 0.0
        assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_padded_vocabulary_rows_have_no_probability() -> None:
    """F14: ids from len(tokenizer) on cannot be sampled, so the trainer's distribution leaves them out too."""
    model = tiny_model(vocab_size=70, initializer_range=0.2)
    row = packed([make_sample([1, 2, 3], [4, 5, 6])], torch.float32)
    before, _ = token_logprobs(model, output_head(model, 60), row, max_logit_tokens=9)
    with torch.no_grad():
        model.get_output_embeddings().weight[60:] = 100.0
    after, _ = token_logprobs(model, output_head(model, 60), row, max_logit_tokens=9)
    assert torch.equal(before, after)


def test_toy_model_that_knows_the_next_token() -> None:
    """F39: where token t+1 = f(t) for certain, every chosen log-probability is 0; a shift by one would show."""
    vocab_size = 16
    model = tiny_model(vocab_size=vocab_size, hidden_size=16, num_heads=2, num_layers=1, tied=False)
    successor = [(5 * i + 3) % vocab_size for i in range(vocab_size)]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        model.lm_head.weight.zero_()
        model.lm_head.weight[successor, range(vocab_size)] = 50.0
    ids = [7]
    for _ in range(9):
        ids.append(successor[ids[-1]])
    samples = [make_sample(ids[:3], ids[3:], member=0), make_sample(ids[:3], ids[3:6], member=1)]
    row = packed(samples, torch.float32)
    logprobs, entropy = token_logprobs(model, output_head(model, vocab_size), row, max_logit_tokens=4)
    assert float(logprobs.detach().abs().max()) < 1e-6
    assert float(entropy.detach().abs().max()) < 1e-6
