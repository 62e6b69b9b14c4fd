"""A Ray cluster of several nodes (raylets) on this machine, for tests. A script, run by the Python that has Ray.

``python ray_nodes.py NUM_NODES NUM_CPUS``; the first node is the head. Prints ``{"address": ..., "nodes": [id, ...]}``,
then obeys lines of JSON on the standard input: ``{"lose": node id}`` kills a node's raylet with -9, its workers end by
themselves; ``{"add": num_cpus}`` adds one. Ends, with everything that it started, at the input's end.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Idle workers started in advance cost seconds of a small machine.
os.environ.setdefault("RAY_enable_worker_prestart", "0")

from ray.cluster_utils import Cluster

STORE_BYTES = 80 << 20


def main() -> None:
    num_nodes, num_cpus = int(sys.argv[1]), int(sys.argv[2])
    head = {"num_cpus": num_cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {cluster.head_node.node_id: cluster.head_node}
    try:
        for _ in range(num_nodes - 1):
            node = cluster.add_node(num_cpus=num_cpus, object_store_memory=STORE_BYTES)
            nodes[node.node_id] = node
        say({"address": cluster.address, "nodes": list(nodes)})
        for line in sys.stdin:
            asked = json.loads(line)
            if "lose" in asked:
                for process in nodes.pop(asked["lose"]).all_processes["raylet"]:
                    process.process.kill()
                say({"lost": asked["lose"]})
            else:
                node = cluster.add_node(num_cpus=asked["add"], object_store_memory=STORE_BYTES, wait=False)
                nodes[node.node_id] = node
                say({"added": node.node_id})
    finally:
        cluster.shutdown()


def say(message: dict) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
