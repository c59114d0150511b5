"""Adapters for an engine that loads them itself; the routes of a worker (docs/adapters.md) need none of this."""

from dynamo.common.lora.downloader import LoRADownloader
from dynamo.common.lora.manager import LoRAInfo, LoRAManager, LoRASourceProtocol, get_lora_manager
from dynamo.common.lora.once_lock import OnceLock

__all__ = ["LoRADownloader", "LoRAInfo", "LoRAManager", "LoRASourceProtocol", "OnceLock", "get_lora_manager"]
