"""Serves one page on this machine alone, until it is interrupted."""

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvproof.errors import UsageError

#: Nothing outside this machine reaches it.
HOST = "127.0.0.1"


def serve(page: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve a page at ``/`` of a port, or of a free one for 0, and tell its address once it is there.

    Ends by KeyboardInterrupt alone. Raises `UsageError` for a port that cannot be had. A request that names
    another host is refused: a page from elsewhere must not read this one under its own name.
    """
    body = page.encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host") not in hosts:
                self.send_error(403)
                return
            if self.path != "/":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: the terminal is the reader's."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise UsageError(
            f"cannot serve on port {port} of {HOST}: {error.strerror}; give another --port"
        ) from error
    with server:
        hosts = {f"{name}:{server.server_port}" for name in (HOST, "localhost")}
        on_ready(f"http://{HOST}:{server.server_port}/")
        server.serve_forever()
