"""What runs in the server's process. ``serving`` is the server without vLLM, ``vllm_0_32`` is vLLM."""
