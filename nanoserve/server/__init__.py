"""HTTP in front of an engine, as OpenAI's API: who asks, how much of it, and what goes back on the wire.

A request goes `app.py` -> `calls.py` -> `desk.py` -> `thread.py` -> `Engine.step` -> `desk.py` -> `stream.py`.
Everything but `thread.py` runs in the event loop; `thread.py` is the one thread that steps and changes the engine.
"""
