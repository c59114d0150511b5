"""Text to tokens and back: tokenizers, chat templates, streaming detokenisation, stop conditions. Pure: no I/O but
reading a model's files, no clock, no environment."""

from dynamo.text.control_tokens import ControlTokens, RenderedPrompt
from dynamo.text.decoder import ChoiceDecoder
from dynamo.text.detokenizer import Detokenizer
from dynamo.text.model import TextModel, load_text_model
from dynamo.text.prefix_cache import CachedTokenizer, CacheStats
from dynamo.text.stops import StopStrings
from dynamo.text.templates import PLAIN_TEMPLATE, ChatTemplate, TemplateRejected
from dynamo.text.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "PLAIN_TEMPLATE",
    "ByteTokenizer",
    "CacheStats",
    "CachedTokenizer",
    "ChatTemplate",
    "ChoiceDecoder",
    "ControlTokens",
    "Detokenizer",
    "JsonTokenizer",
    "RenderedPrompt",
    "StopStrings",
    "TemplateRejected",
    "TextModel",
    "Tokenizer",
    "load_text_model",
    "load_tokenizer",
]
