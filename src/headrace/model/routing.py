"""The routers of a mixture-of-experts model: count what they choose, replay what an engine chose, balance the load.

A router is deep inside the model and is given hidden states alone. What a pass wants of it travels as the layout does,
by the model's keyword arguments (``routing=...``): the attention of a layer leaves it for the router of that layer on
the same thread (``model/attention.py``). So nothing about a pass lives in the model, and a layer that the backward pass
computes again, on whatever thread, routes as it did the first time.

Legend: T tokens of a pass, L routers of the model, E experts, K experts of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from headrace.model.attention import Choice, Routing, announced


@dataclass(frozen=True, slots=True)
class RouterShape:
    """The routers of a whole model."""

    num_routers: int
    num_experts: int
    num_chosen: int


@dataclass(frozen=True, slots=True)
class _Hook:
    """Hands a router's choice to the pass that it belongs to. Without state, so that copies of a model may share it."""

    number: int
    """Which router of the whole model, also where a pipeline stage holds some of them only."""

    def __call__(self, router: nn.Module, _: Any, choice: Choice) -> Choice | None:
        routing, announced.routing = announced.routing, None
        return None if routing is None else routing.route(self.number, router, choice)


def watch_routers(model: PreTrainedModel) -> None:
    """Let passes over ``model`` say ``routing=...``. Does nothing to a model whose routers headrace does not know."""
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    for number, router in enumerate(routers):
        router.register_forward_hook(_Hook(number))


def router_shape(model: nn.Module) -> RouterShape | None:
    """Of a whole model after :func:`watch_routers`; None where there is no router to watch."""
    watched: list[Any] = [
        module for module in model.modules() if any(isinstance(h, _Hook) for h in module._forward_hooks.values())
    ]
    return RouterShape(len(watched), watched[0].num_experts, watched[0].top_k) if watched else None


class RouterRecorder(Routing):
    """What the routers chose in one pass, and nothing else."""

    def __init__(self, shape: RouterShape) -> None:
        self._shape = shape
        self._ids: dict[int, Tensor] = {}

    def route(self, number: int, router: Any, choice: Choice) -> Choice:
        self._ids[number] = choice[2]
        return choice

    def ids_TLK(self) -> Tensor:
        """On the CPU, in one byte for each choice where that is enough."""
        dtype = torch.uint8 if self._shape.num_experts <= 256 else torch.int16
        return torch.stack([self._ids[i] for i in range(self._shape.num_routers)], dim=1).to(dtype).cpu()


class RouterPass(Routing):
    """One training pass over a packed row: replays recorded choices, adds the load-balance loss, counts.

    ``uses_T``: of how many samples a token of the row is a part (a shared prompt: of several; padding: of none).
    ``replayed_TLK``: recorded choices; -1 leaves the choice to the router. ``slope_LE``: see :meth:`RouterLoad.slope`.
    """

    def __init__(
        self,
        shape: RouterShape,
        uses_T: Tensor,
        *,
        replayed_TLK: Tensor | None = None,
        slope_LE: Tensor | None = None,
    ) -> None:
        self._shape = shape
        self._uses_T = uses_T.double()
        self._replayed_TLK = replayed_TLK
        self._slope_LE = slope_LE
        self.sums: dict[int, Tensor] = {}
        """Router -> float64 [2 E + 2], see :class:`RouterLoad`. A layer that is computed again writes the same anew."""

    def route(self, number: int, router: Any, choice: Choice) -> Choice:
        logits_TE, weights_TK, own_TK = choice
        probability_TE = logits_TE.softmax(-1, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
        ids_TK = own_TK
        if self._replayed_TLK is not None:
            recorded_TK = self._replayed_TLK[:, number].long()
            ids_TK = torch.where(recorded_TK >= 0, recorded_TK, own_TK)
            # As the router itself makes them of its own choice: with gradient, from today's logits (R3, section 3).
            weights_TK = probability_TE.gather(1, ids_TK)
            if router.norm_topk_prob:
                weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
            weights_TK = weights_TK.to(logits_TE.dtype)
        self.sums[number] = self._sums(probability_TE.detach(), ids_TK, own_TK)
        if self._slope_LE is not None and torch.is_grad_enabled():
            slope_E = self._slope_LE[number].to(probability_TE)
            loss = self._uses_T.to(probability_TE) @ (probability_TE @ slope_E)
            weights_TK = _AddLoss.apply(weights_TK, loss)  # type: ignore[no-untyped-call]
        return logits_TE, weights_TK, ids_TK

    def _sums(self, probability_TE: Tensor, ids_TK: Tensor, own_TK: Tensor) -> Tensor:
        uses_T, num_chosen = self._uses_T, ids_TK.shape[1]
        counts_E = uses_T.new_zeros(self._shape.num_experts)
        counts_E.index_add_(0, ids_TK.reshape(-1), uses_T.repeat_interleave(num_chosen))
        differs_T = (ids_TK.sort(-1).values != own_TK.sort(-1).values).any(-1)
        totals_2 = torch.stack((uses_T.sum(), uses_T @ differs_T.double()))
        return torch.cat((counts_E, uses_T @ probability_TE.double(), totals_2))


class _AddLoss(torch.autograd.Function):
    """The same weights; the backward pass adds the gradient of ``loss``, whatever the pass's own loss is.

    So no loss has to be carried out of the model, which a pipeline stage could not do.
    """

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.like)


class RouterLoad:
    """What the routers did with all tokens of a minibatch: each sample's tokens once, shared or not.

    ``sums_LX`` (float64, [L, 2 E + 2]) adds up over rows and processes: choices of each expert, sums of each expert's
    probability, tokens, tokens whose choice was replayed and is not the router's own.
    """

    def __init__(self, shape: RouterShape) -> None:
        self._shape = shape
        self.sums_LX = torch.zeros(shape.num_routers, 2 * shape.num_experts + 2, dtype=torch.float64)

    def add(self, passed: RouterPass) -> None:
        if passed.sums:  # a pipeline stage may have no router
            self.sums_LX[list(passed.sums)] += torch.stack(list(passed.sums.values())).cpu()

    def _shares(self) -> tuple[Tensor, Tensor, Tensor]:
        """(f [L, E], P [L, E], number of tokens [L]): shares of the choices and mean probabilities."""
        num_experts = self._shape.num_experts
        num_tokens_L = self.sums_LX[:, -2]
        tokens_L1 = num_tokens_L[:, None].clamp_min(1)
        share_LE = self.sums_LX[:, :num_experts] / (tokens_L1 * self._shape.num_chosen)
        return share_LE, self.sums_LX[:, num_experts:-2] / tokens_L1, num_tokens_L

    def slope(self, coefficient: float) -> Tensor:
        """[L, E]: derivative of the load-balance loss by the sum over tokens of an expert's probability.

        The loss of one router is coefficient x E x sum over experts of f_e P_e (Fedus, Zoph, Shazeer, "Switch
        Transformers", 2022, equations 4 to 6, with f_e divided by K so that an even load gives the coefficient
        itself), and the losses of the routers are added. f is constant: choices have no derivative.
        """
        share_LE, _, num_tokens_L = self._shares()
        return coefficient * self._shape.num_experts * share_LE / num_tokens_L[:, None].clamp_min(1)

    def metrics(self, *, with_replay: bool) -> dict[str, float]:
        """Names and values for metrics.jsonl; empty where no token was computed.

        ``load_max_violation``: largest share of an expert over the mean share, minus 1, of the worst router (Wang et
        al., "Auxiliary-loss-free load balancing", 2024). ``load_entropy``: 1 is even, 0 one expert; mean over routers.
        ``balance_loss``: without coefficient, 1 where the load is even; mean over routers.
        """
        share_LE, mean_probability_LE, num_tokens_L = self._shares()
        if not num_tokens_L.any():
            return {}
        num_experts = self._shape.num_experts
        entropy_L = -torch.special.xlogy(share_LE, share_LE).sum(-1) / math.log(max(2, num_experts))
        metrics = {
            "router/balance_loss": float((num_experts * share_LE * mean_probability_LE).sum(-1).mean()),
            "router/load_max_violation": float(share_LE.max()) * num_experts - 1,
            "router/load_entropy": float(entropy_L.mean()),
            "router/num_dead_experts": float((share_LE == 0).sum()),
        }
        if with_replay:
            metrics["router/replay_changed_share"] = float(self.sums_LX[:, -1].sum() / num_tokens_L.sum())
        return metrics
