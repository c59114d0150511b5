"""The two pages for people: what is served, at `/`, and the API's reference, at `/docs`.

Both work without internet: the reference is drawn by one script that comes with the package.
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Final

from dynamo.frontend.base.access import identity_of
from dynamo.frontend.base.asgi import Receive, Scope, Send, first_headers, reply

DOCS_PATH: Final = "/docs"
SCRIPT_PATH: Final = "/docs/rapidoc-min.js"
MAX_LISTED: Final = 100  # of the models; /v1/models has all of them

_HTML: Final = b"text/html; charset=utf-8"
_SAFE: Final = (
    # A model's name comes from a worker: it is escaped, and even then nothing foreign may run or be fetched.
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
)
_SAFE_DOCS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data:; style-src 'unsafe-inline'; "
        b"frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
)

_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem;color:#222;background:#fff}"
    "pre{background:#f3f3f3;padding:.8rem;overflow-x:auto}code{font-size:.9em}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}pre{background:#262626}a{color:#8ab4f8}}"
)


class HomePage:
    """`/`: the models, a request that works, and links. HTML for browsers, plain text for everything else."""

    def __init__(self, models: Callable[[], Sequence[str]], chat_path: str, links: Sequence[tuple[str, str]]) -> None:
        """`models` gives the names that are served now; `links` are (path, description)."""
        self._models, self._chat_path, self._links = models, chat_path, links

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = first_headers(scope)
        identity = identity_of(scope)
        names = [name for name in self._models() if identity is None or identity.allows_model(name)]
        request = self._request(scope, headers.get(b"host", b""), names)
        if b"text/html" in headers.get(b"accept", b""):
            await reply(send, 200, self._html(names, request).encode(), content_type=_HTML, extra=_SAFE)
        else:
            await reply(send, 200, self._text(names, request).encode(), content_type=b"text/plain; charset=utf-8")

    def _request(self, scope: Scope, host: bytes, names: list[str]) -> str:
        # The address that this client used: it is the one that works for it.
        url = f"{scope.get('scheme', 'http')}://{host.decode('latin-1') or 'localhost'}{self._chat_path}"
        body = {"model": names[0] if names else "MODEL", "messages": [{"role": "user", "content": "Hello"}]}
        return f"curl {shlex.quote(url)} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"

    def _text(self, names: list[str], request: str) -> str:
        lines = [f"models: {', '.join(names[:MAX_LISTED]) or 'none yet'}", "", request, ""]
        return "\n".join([*lines, *(f"{path:20}{what}" for path, what in self._links)]) + "\n"

    def _html(self, names: list[str], request: str) -> str:
        listed = "".join(f"<li><code>{html.escape(name)}</code></li>" for name in names[:MAX_LISTED])
        more = f"<p>and {len(names) - MAX_LISTED} more</p>" if len(names) > MAX_LISTED else ""
        models = f"<ul>{listed}</ul>{more}" if names else "<p>None yet: no worker has registered.</p>"
        links = "".join(
            f'<li><a href="{html.escape(path)}"><code>{html.escape(path)}</code></a> {html.escape(what)}</li>'
            for path, what in self._links
        )
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>dynamo</title><style>{_STYLE}</style>'
            f"<h1>Models served here</h1>{models}<h2>Try it</h2><pre><code>{html.escape(request)}</code></pre>"
            f"<p>Or set the base URL of any OpenAI client to this address and <code>/v1</code>.</p><ul>{links}</ul></html>\n"
        )


class DocsPage:
    """`/docs`: the OpenAPI document as a page to read and to try."""

    def __init__(self, root_path: str = "") -> None:
        """`root_path`: the prefix below which browsers reach this page."""
        self._body = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>API reference</title>'
            f'<script src="{root_path}{SCRIPT_PATH}"></script>'
            f'<rapi-doc spec-url="{root_path}/openapi.json" load-fonts="false" render-style="focused" schema-expand-level="1" show-header="false" theme="light" '
            'allow-authentication="true" allow-server-selection="false"></rapi-doc></html>\n'
        ).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, 200, self._body, content_type=_HTML, extra=_SAFE_DOCS)


class ScriptRoute:
    """The script behind `/docs`; read on first use, because most frontends never show the page."""

    def __init__(self) -> None:
        self._body: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._body is None:
            self._body = files("dynamo.frontend.http").joinpath("static/rapidoc-min.js").read_bytes()
        cached = (b"cache-control", b"public, max-age=86400")
        await reply(send, 200, self._body, content_type=b"text/javascript; charset=utf-8", extra=(cached,))
