"""The version of the native system whose names these are."""

__version__ = "1.6.1+unified"
__all__ = ["__version__"]
