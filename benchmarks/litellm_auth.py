"""One key with a budget for LiteLLM's proxy without a database: its hook for keys of one's own, with its own checks after it.

The counter of the budget is LiteLLM's (`spend:key:...`, in Redis), and so are the reservation before a request and the callback
that books a request, which the proxy registers by itself only with a database. The environment has the budget and the keys.
"""

from __future__ import annotations

import os

from fastapi import Request
from litellm.proxy._types import ProxyException, UserAPIKeyAuth
from litellm.proxy.hooks.proxy_track_cost_callback import ProxyDBLogger

NAME = "budgeted-key"

spending = ProxyDBLogger()


async def authenticate(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Return the record of the key. A request with the other key is refused, with what was booked as the message."""
    if api_key == os.environ["BUDGET_BOOKED_KEY"]:
        from litellm.proxy.proxy_server import get_current_spend  # it imports this file

        spent = await get_current_spend(counter_key=f"spend:key:{NAME}", fallback_spend=0.0)
        raise ProxyException(message=f"booked={spent!r}.", type="auth_error", param=None, code=401)
    if api_key != os.environ["BUDGET_KEY"]:
        raise ProxyException(message="unknown key", type="auth_error", param=None, code=401)
    return UserAPIKeyAuth(api_key=NAME, token=NAME, max_budget=float(os.environ["BUDGET_USD"]), spend=0.0)
