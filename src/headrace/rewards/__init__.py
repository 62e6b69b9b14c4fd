"""Rewards: what judges an episode. A Score is a finite value in its declared range, or a classed error (I14).

``build.build_rewards`` makes a run's weighted sum from its configuration; ``base.reward`` turns a function into a
reward. String comparisons run in process; verifiers and users' functions run in killable, memory-capped worker
processes that test themselves at start (I15). Nothing here imports torch."""
