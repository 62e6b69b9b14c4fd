"""Many engines behind one: routing, deaths and restarts, joins and leaves, and one publish for all of them.

``FleetEngine`` (``headrace.engines.fleet.fleet``) is what a run sees. Its members are engines of any kind, made by an
injected factory. Imports no torch.
"""
