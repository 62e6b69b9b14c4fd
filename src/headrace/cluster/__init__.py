"""Where actors run: threads of this process now; subprocesses, Ray and Kubernetes later."""
