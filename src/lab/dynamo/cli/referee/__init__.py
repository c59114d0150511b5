"""`dynamo conformance http://HOST/v1`: hold any OpenAI-compatible server to what its clients rely on."""

__all__: list[str] = []
