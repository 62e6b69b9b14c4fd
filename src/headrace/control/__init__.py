"""The control room: who may start, what is too old, what belongs together, what became of it, who waits on whom.

Pure logic. No torch, no files, no threads; time comes in through a clock. ``loop.py`` drives these state machines, and
so does ``simulate`` in virtual time: nothing in here knows which of the two it is.
"""
