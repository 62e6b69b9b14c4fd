"""vLLM as a policy engine: a server, and a client that talks to it over a socket pair.

The server runs in another process, by a Python that has vLLM, or on a thread of the run's own (``launch``). ``client``
has :class:`~headrace.engines.vllm.client.VllmEngine`, which implements ``protocols.Engine``; ``server`` holds what is
the same on the other side, wherever it runs, and ``wire`` what travels between the two. Only ``server.vllm_0_32``
imports vLLM, and nothing is imported here: the server's Python need not have the trainer's packages.
"""
