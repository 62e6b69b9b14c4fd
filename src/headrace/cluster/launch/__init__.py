"""How a run is started on other people's clusters: manifests for Kubernetes (KubeRay), scripts for Slurm and mpirun.

Nothing is computed here: a configuration goes in, text comes out, and the cluster's own command takes it.
"""
