"""Training without rollouts: supervised fine-tuning, reward models from preference pairs, and DPO.

``run.py`` is the loop that the three share (order, validation, record, checkpoints, resume); ``sft.py``,
``reward_model.py`` and ``dpo.py`` say what each trains on, minimises and measures. Import from the modules.
"""
