"""Where actors run, and how one is called: in this process, or by messages that may be lost, late, doubled or out of
order. ``actors.py`` says what a call promises, ``wire.py`` what its values look like as bytes, ``remote_engine.py``
makes an engine of an actor."""
