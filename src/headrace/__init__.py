"""headrace: the whole reinforcement-learning post-training loop for language models and agents."""

__version__ = "0.1.0"
