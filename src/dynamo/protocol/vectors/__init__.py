"""Embeddings, classes, scores: the bodies of these APIs, what workers answer, and the answers that clients read. Pure."""

from dynamo.protocol.vectors.requests import EmbeddingRequest, ResultRequest, VectorRequest
from dynamo.protocol.vectors.results import Vector, Vectors, read_vectors

__all__ = ["EmbeddingRequest", "ResultRequest", "Vector", "VectorRequest", "Vectors", "read_vectors"]
