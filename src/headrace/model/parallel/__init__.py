"""Several processes train one model: who holds which part of it, and how a packed row becomes gradients on all.

``check.py`` refuses layouts that cannot be, ``mesh.py`` says where a process stands, ``apply.py`` splits a loaded
model, ``forecast.py`` says what it costs. torch's and transformers' own machinery does the splitting; import from the
modules. ``check`` and ``forecast`` need no torch.
"""
