"""The run's configuration: its schema (``schema.py``), reading it (``load.py``) and checking it (``checks.py``).

Imports neither torch nor any back end, so that a wrong key is found before anything heavy is loaded.
"""
