"""Discovery through etcd."""

from dynamo.runtime.discovery.etcd.discovery import EtcdDiscovery

__all__ = ["EtcdDiscovery"]
