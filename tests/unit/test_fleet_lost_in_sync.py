"""An engine that is found dead by its health check while it takes new weights (found by simulation seed 442)."""

from __future__ import annotations

from fleet_scripted import V0, V1, ReadyCatchUp, Yard, make_fleet, proved

from headrace.protocols import Probed, WeightUpdate
from headrace.scripted import run_in_virtual_time


class FindsItDead(ReadyCatchUp):
    """While engine 1 is proved, its health check says that it is dead; its answers still arrive."""

    async def prove(self, name: str, engine: Probed, update: WeightUpdate) -> bool:
        if name == "engine-1":
            self.fleet.supervisor.members[1].lose("it does not say that it is well")
        return await super().prove(name, engine, update)


def test_it_is_left_out_and_the_publish_goes_on() -> None:
    """I7, I19, failure 88: the others serve the new version, and the dead one does not serve again unproved."""

    async def main() -> None:
        catch_up = FindsItDead()
        fleet = make_fleet(Yard(), catch_up=catch_up, num_engines=3, max_engine_lag=1)
        catch_up.fleet = fleet
        await proved(fleet)
        catch_up.version = V1
        await fleet.pause("keep")
        await fleet.update_weights(WeightUpdate(version=V1, tensors={}))
        await fleet.resume()
        assert fleet.version == V1 != V0
        assert sorted(fleet.states.serving()) == [0, 2]
        assert catch_up.proved == ["engine-0", "engine-1", "engine-2"]
        await fleet.close()

    run_in_virtual_time(main)
