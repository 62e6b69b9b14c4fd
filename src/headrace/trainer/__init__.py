"""The trainer: forward, forward_backward, optim_step, publish, save, restore, in one process.

``PolicyTrainer`` (trainer.py) holds the model and the optimizer and never learns which algorithm runs;
``plan_update`` (plan.py) turns a rollout batch into minibatches. Import from the modules.
"""
