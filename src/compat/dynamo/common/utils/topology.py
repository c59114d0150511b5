"""Not part of this system. The import error names what takes its place."""

raise ImportError(
    "dynamo.common.utils.topology (topology domains from files of a pod) is not part of dynamo-unified; "
    "set ModelRuntimeConfig.topology_domains and the kv_transfer_* fields yourself, see dynamo.llm.ModelRuntimeConfig."
)
