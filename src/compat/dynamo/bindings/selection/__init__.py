"""`SelectionService` of the native bindings: workers that register themselves, and which of them serves a prompt.

service = SelectionService()
await service.upsert_worker({"worker_id": 1, "endpoint": "http://a:8000", "block_size": 16, "kv_events_endpoints": {0: "tcp://a:5557"}})
chosen = await service.select_and_reserve({"token_ids": prompt})
await service.prefill_complete(chosen["selection_id"])
await service.free_reservation(chosen["selection_id"])
"""

from dynamo.bindings.selection.records import SelectionCacheConfig
from dynamo.bindings.selection.service import SelectionService

__all__ = ["SelectionCacheConfig", "SelectionService"]
