"""Which actors share a bundle of resources, and how large it is. Pure logic; Ray finds the nodes.

``disaggregated``: every actor has a bundle of its own. ``colocated``: engine i lies in the bundle of trainer rank i,
on the same node and the same GPU, of which each takes its fraction; the lease (control/lease.py) says who computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.cluster.spec import Role

Resources = Mapping[str, float]
"""``CPU``, ``GPU`` and a cluster's own names -> amount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Resources on one node, and who uses them."""

    actors: tuple[tuple[Role, int], ...]
    demands: tuple[Resources, ...]
    """Of each actor."""

    @property
    def resources(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for demand in self.demands:
            for name, amount in demand.items():
                total[name] += amount  # type: ignore[assignment]  # a counter of floats
        return {name: amount for name, amount in total.items() if amount > 0}

    def demand_of(self, role: Role) -> Resources:
        """Of its actor of this role."""
        return next(d for (r, _), d in zip(self.actors, self.demands, strict=True) if r == role)


def bundles(counts: Mapping[Role, int], demands: Mapping[Role, Resources], *, colocated: bool) -> tuple[Bundle, ...]:
    """One bundle for each actor, or for each pair of engine and trainer rank where ``colocated``. Trainer ranks count
    from 1: rank 0 is the controller's process, which holds resources of its own."""
    made: list[Bundle] = []
    paired = min(counts.get("engine", 0), counts.get("trainer", 0)) if colocated else 0
    for index in range(paired):
        roles: tuple[tuple[Role, int], ...] = (("trainer", index + 1), ("engine", index))
        made.append(Bundle(actors=roles, demands=(demands["trainer"], demands["engine"])))
    for role, count in counts.items():
        first = 1 if role == "trainer" else 0
        for index in range(paired if role in ("engine", "trainer") else 0, count):
            made.append(Bundle(actors=((role, index + first),), demands=(demands[role],)))
    return tuple(made)


def describe(made: Sequence[Bundle]) -> str:
    """For a person: ``3 bundles, CPU 4, GPU 2 in all, the largest CPU 2, GPU 1``."""

    def text(resources: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items())) or "nothing"

    total: dict[str, float] = {}
    for bundle in made:
        for name, amount in bundle.resources.items():
            total[name] = total.get(name, 0.0) + amount
    largest = max((bundle.resources for bundle in made), key=lambda r: (r.get("GPU", 0), r.get("CPU", 0)), default={})
    return f"{len(made)} bundles with {text(total)} in all, the largest with {text(largest)}"
