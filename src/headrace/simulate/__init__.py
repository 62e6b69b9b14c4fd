"""The real loop, control rules and record in virtual time, over actors and a transport that fail as a seed says.

``headrace simulate control --seed N`` runs one seed; ``scenario.py`` says what a seed means, ``network.py`` and
``disk.py`` what may go wrong, ``actors.py`` what computes, ``monitor.py`` what must hold at every event, and
``control.py`` runs a seed through all its lives."""
