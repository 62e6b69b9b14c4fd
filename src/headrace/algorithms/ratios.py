"""Log-ratios between the current and the proximal policy, at the level of a token or of a whole episode.

Legend: N trained tokens of a micro-batch, E its episodes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio| before exp. exp(20) = 4.9e8 lies far beyond every clip bound in use, so no value that a
composition keeps is changed; without it one token at log-ratio 89 overflows float32 to inf, and inf * 0 is NaN
(FAILURES.md 58). Beyond the bound the gradient is 0."""


def bounded_exp(log_ratio_N: Tensor) -> Tensor:
    """exp of a log-ratio clamped to [-20, 20]. Any shape."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def episode_lengths(episode_index_N: Tensor, num_episodes: int) -> Tensor:
    """Trained tokens of each episode, int64 [E]."""
    return torch.bincount(episode_index_N, minlength=num_episodes)


def token_log_ratio(logprobs_N: Tensor, proximal_N: Tensor, episode_index_N: Tensor, num_episodes: int) -> Tensor:
    """log r_t = l_t - lo_t, [N] (PPO, arXiv 1707.06347, section 3)."""
    return logprobs_N - proximal_N


def sequence_log_ratio(logprobs_N: Tensor, proximal_N: Tensor, episode_index_N: Tensor, num_episodes: int) -> Tensor:
    """GSPO's length-normalised log-ratio in its token form, [N] (arXiv 2507.18071, sections 4.1 and 4.3).

    Value: the mean of l - lo over the episode's trained tokens, the same for all of them. Gradient: token t's goes
    through l_t alone, ``s_it = sg(s_i) * exp(l_t - sg(l_t))``, so that a token's advantage weighs its own token.
    """
    difference_N = (logprobs_N - proximal_N).detach()
    sums_E = difference_N.new_zeros(num_episodes).index_add(0, episode_index_N, difference_N)
    means_E = sums_E / episode_lengths(episode_index_N, num_episodes).clamp(min=1)
    return means_E[episode_index_N] + (logprobs_N - logprobs_N.detach())


RATIO_LEVELS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,
}
"""Name -> f(log-probabilities [N], proximal [N], episode index [N], E) -> log-ratio [N]."""
