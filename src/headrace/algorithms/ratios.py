"""Log-ratios between the current policy and its anchor, at the level of a token or of a whole episode.

The anchor is the proximal policy (the policy at the start of the rollout batch) or the behaviour policy (the one that
sampled). Legend: N trained tokens of a micro-batch, E its episodes.
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


def episode_sums(values_N: Tensor, episode_index_N: Tensor, num_episodes: int) -> Tensor:
    """Sum over each episode's trained tokens, [E], with gradient."""
    return values_N.new_zeros(num_episodes).index_add(0, episode_index_N, values_N)


def episode_means(values_N: Tensor, episode_index_N: Tensor, num_episodes: int) -> Tensor:
    """Mean over each episode's trained tokens, [E], with gradient; 0 for an episode without any."""
    lengths_E = episode_lengths(episode_index_N, num_episodes).clamp(min=1)
    return episode_sums(values_N, episode_index_N, num_episodes) / lengths_E


def token_form(value_E: Tensor, values_N: Tensor, episode_index_N: Tensor) -> Tensor:
    """Value: the episode's, the same for all its tokens. Gradient: token t's goes through ``values_N[t]`` alone, so
    that a token's advantage weighs its own token (GSPO-token, arXiv 2507.18071, section 4.3)."""
    return value_E.detach()[episode_index_N] + (values_N - values_N.detach())


def token_log_ratio(logprobs_N: Tensor, anchor_N: Tensor, episode_index_N: Tensor, num_episodes: int) -> Tensor:
    """log r_t = l_t - lo_t, [N] (PPO, arXiv 1707.06347, section 3)."""
    return logprobs_N - anchor_N


def sequence_log_ratio(logprobs_N: Tensor, anchor_N: Tensor, episode_index_N: Tensor, num_episodes: int) -> Tensor:
    """GSPO's length-normalised log-ratio in its token form, [N] (arXiv 2507.18071, sections 4.1 and 4.3): the mean of
    l - lo over the episode's trained tokens, ``s_it = sg(s_i) * exp(l_t - sg(l_t))``."""
    difference_N = logprobs_N - anchor_N
    return token_form(episode_means(difference_N, episode_index_N, num_episodes), difference_N, episode_index_N)


def trajectory_log_ratio(logprobs_N: Tensor, anchor_N: Tensor, episode_index_N: Tensor, num_episodes: int) -> Tensor:
    """The log-ratio of the whole episode, sum of l - lo, in token form, [N] (TOPR, arXiv 2503.14286, equation 4)."""
    difference_N = logprobs_N - anchor_N
    return token_form(episode_sums(difference_N, episode_index_N, num_episodes), difference_N, episode_index_N)


RATIO_LEVELS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,
    "trajectory": trajectory_log_ratio,
}
"""Name -> f(log-probabilities [N], anchor [N], episode index [N], E) -> log-ratio [N]."""


def interpolated_proximal(
    logprobs_N: Tensor, behaviour_N: Tensor, behaviour_version_N: Tensor, proximal_version: int, version: int
) -> Tensor:
    """A-3PO: lo = lb + alpha * sg(l - lb), alpha = (v_prox - v_b) / (v - v_b): the proximal policy's log-probabilities
    guessed from the ages of the tokens, without a pass (arXiv 2512.06547).

    ``behaviour_version_N``: the version that sampled each token; ``proximal_version``: the one that the batch began
    with; ``version``: the one that is being made, the next to be published. A token that the current version sampled
    itself (v = v_b) takes lb.
    """
    span_N = version - behaviour_version_N
    share_N = (proximal_version - behaviour_version_N).double() / span_N
    alpha_N = torch.where(span_N > 0, share_N, 0.0).to(logprobs_N.dtype)
    return behaviour_N + alpha_N * (logprobs_N - behaviour_N).detach()
