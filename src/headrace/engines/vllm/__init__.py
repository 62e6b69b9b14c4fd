"""vLLM as a policy engine: a server in another process, run by a Python that has vLLM, and a client that talks to it.

``client`` has :class:`~headrace.engines.vllm.client.VllmEngine`, which implements ``protocols.Engine``. ``server``
holds what runs in the other process, ``wire`` what travels between the two. Only ``server.vllm_0_32`` imports vLLM, and
nothing is imported here: the server's Python does not have the trainer's packages.
"""
