"""Embeddings, classes, scores: the bodies of these APIs, what workers answer, and the answers that clients read. Pure."""

from dynamo.protocol.vectors.requests import EmbeddingRequest, ResultRequest, VectorRequest
from dynamo.protocol.vectors.results import InputVector, InputVectors, read_vectors

__all__ = ["EmbeddingRequest", "InputVector", "InputVectors", "ResultRequest", "VectorRequest", "read_vectors"]
