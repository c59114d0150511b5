"""The servers that the tests of this folder share, started when the first test asks."""

from support.etcd_server import etcd_server
from support.fake_kubernetes import patient_requests

__all__ = ["etcd_server", "patient_requests"]
