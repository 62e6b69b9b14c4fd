"""Tasks and environments: where problems come from (arithmetic, files, reasoning-gym, a third party's code) and what
answers the policy between its turns. ``tasks.build_tasks`` makes the train and held-out sets of a run,
``registry.make_environment`` the environment of a task, and ``runner.EpisodeRunner`` plays it. Nothing here imports
torch."""
