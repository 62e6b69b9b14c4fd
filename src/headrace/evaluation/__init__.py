"""Evaluation: accuracy on held-out tasks with honest intervals, pass@k, and paired comparison. No torch here.

``statistics`` holds the pure numbers, ``result`` what an evaluation found, ``evaluate`` runs one, ``render`` shows it.
"""
