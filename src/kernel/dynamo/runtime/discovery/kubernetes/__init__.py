"""Discovery through the API of Kubernetes."""

from dynamo.runtime.discovery.kubernetes.discovery import KubernetesDiscovery

__all__ = ["KubernetesDiscovery"]
