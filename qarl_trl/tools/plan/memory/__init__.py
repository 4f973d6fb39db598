"""
Bytes on each GPU, and which settings save some.

1. `learner.py`, `engine.py`, `backward.py`: a formula for each kind of memory.
2. `moments.py`: which of them are there at the same time, and whether that fits.
3. `levers.py`: settings that save memory; `search.py`: few that together make a run fit; `advice.py`: what a user is
   told of them.
4. `table.py`: all of it as lines.
"""
