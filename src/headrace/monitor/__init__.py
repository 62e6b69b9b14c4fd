"""What a run shows: health checks, live progress, sinks to trackers, and the report. No torch here.

``health`` judges each batch's metrics, ``progress`` draws the terminal, ``fanout`` feeds the sinks of ``sinks``,
``report`` and ``curve`` turn a run folder into report.html and a PNG. metrics.jsonl stays the truth: everything here
can be made again from it.
"""
