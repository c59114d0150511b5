"""Several frontend processes on one port (`--workers`): a parent that deals connections out, and its members.

`supervisor.py` is the parent, `member.py` one of the processes, `messages.py` what they send each other, `places.py` the
counters they share.
"""

__all__: list[str] = []
