"""Models: load, render, pack, score.

``load_model`` gives one model object that trainer and embedded engine share; ``ChatRenderer`` turns messages into
ids; ``pack`` lays samples out in rows without padding; ``token_logprobs`` scores the trained tokens of a row.
Import from the modules; nothing heavy is imported here.
"""
