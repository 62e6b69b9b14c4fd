"""The one command, ``headrace``: a file for each subcommand, wired in ``main.py``.

Nothing heavy is imported before a handler runs, so that ``--help`` and wrong input answer at once.
"""
