"""The OpenAI-compatible frontend: HTTP in, event streams out, models as workers register them."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # before the imports, as one part lies in another source root

from dynamo.frontend.app import Frontend
from dynamo.frontend.args import parse_args
from dynamo.frontend.http.server import HttpServer, PortInUse, serve_until_signal
from dynamo.frontend.settings import FrontendSettings

__all__ = ["Frontend", "FrontendSettings", "HttpServer", "PortInUse", "parse_args", "serve_until_signal"]
