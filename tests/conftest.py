"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# The same examples at every run, so that a red build is red for everybody. `HYPOTHESIS_PROFILE=explore` (or
# --hypothesis-profile) looks further; what it finds becomes an @example.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("repeatable")
