"""Fixtures of this folder, from `support.reference_models`."""

from support.reference_models import configs, core_of, models, save_model, speaking_model, tensors_of

__all__ = ["configs", "core_of", "models", "save_model", "speaking_model", "tensors_of"]
