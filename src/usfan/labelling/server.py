"""The page of `usfan label`: a small web server on this machine, for this user.

It listens on the loopback interface only, and answers only requests that name this very address, so that a page of
another site cannot reach it through a name of its own (DNS rebinding). The address starts with a random token. Images
are named by their number in the run, decoded by another process, and sent re-encoded. Answers need the origin of the
page itself. The page loads nothing from elsewhere, and runs no script but its own file.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
from typing import TypeVar

from flask import Flask, Response, abort, jsonify, request
from waitress.server import create_server
from waitress.wasyncore import close_all
from werkzeug.exceptions import HTTPException

from usfan.data.decoding.pool import decode_in_processes
from usfan.errors import ConfigError, UsfanError, option
from usfan.labelling.again import SecondRun
from usfan.labelling.answers import Answer
from usfan.labelling.session import Session

Value = TypeVar("Value")
LOOPBACK = "127.0.0.1"
SIDE = 800
"""Pixels of the longer side of an image on the page."""
MOST_BODY = 4096
MOST_HEADER = 16384
"""Bytes of a request."""
THREADS = 6
"""As many as a browser opens connections."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "private, max-age=0",
}


class PageServer:
    """The server of a session; port 0 takes one that is free."""

    def __init__(self, session: Session, second_run: SecondRun, port: int = 0) -> None:
        try:
            listener = socket.create_server((LOOPBACK, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used ({error}): choose another {option('port')}"
            ) from None
        self.port = listener.getsockname()[1]
        token = secrets.token_urlsafe(24)
        self.address = f"http://{LOOPBACK}:{self.port}/{token}/"
        self.connections: dict[int, object] = {}
        self.server = create_server(
            create_app(Page(session, second_run), self.port, token),
            self.connections,
            sockets=[listener],
            threads=THREADS,
            max_request_body_size=MOST_BODY,
            max_request_header_size=MOST_HEADER,
        )
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # a queue is no news here

    def run(self) -> None:
        """Answer requests until Ctrl-C."""
        self.server.run()

    def close(self) -> None:
        """End all connections, and so `run`. Only the thread of `run` may call this."""
        close_all(self.connections, ignore_all=True)
        self.server.task_dispatcher.shutdown()


def create_app(page: Page, port: int, token: str) -> Flask:
    """The page as a WSGI application, for requests to this port that know the token."""
    app = Flask("usfan.labelling", static_folder="page", static_url_path=f"/{token}")
    app.config["MAX_CONTENT_LENGTH"] = MOST_BODY
    hosts = (f"{LOOPBACK}:{port}", f"localhost:{port}")  # a tunnel may end at localhost

    @app.before_request
    def check() -> None:
        word = request.path.split("/")[1]
        if request.host not in hosts:
            abort(403, "this page is for this machine alone")
        if not hmac.compare_digest(word.encode(), token.encode()):
            abort(403, "open the address that usfan label printed")
        if request.method == "POST" and request.origin != f"http://{request.host}":
            abort(403, "only the page itself can answer")

    @app.after_request
    def add_headers(response: Response) -> Response:
        response.headers.extend(HEADERS)
        return response

    @app.errorhandler(HTTPException)
    @app.errorhandler(UsfanError)
    @app.errorhandler(OSError)
    def refuse(error: Exception) -> tuple[Response, int]:
        if isinstance(error, HTTPException):
            return jsonify(error=error.description), error.code or 500
        is_mistake = isinstance(error, UsfanError)
        return jsonify(error=str(error)), 400 if is_mistake else 500

    app.add_url_rule(f"/{token}/", "index", lambda: app.send_static_file("index.html"))
    app.add_url_rule(f"/{token}/image/<int:row>", "image", page.image)
    for view in (page.classes, page.state):
        app.add_url_rule(f"/{token}/{view.__name__}", view_func=view)
    for action in (page.answer, page.undo, page.adapt):
        app.add_url_rule(f"/{token}/{action.__name__}", view_func=action, methods=["POST"])
    return app


class Page:
    """Addresses and their answers."""

    def __init__(self, session: Session, second_run: SecondRun) -> None:
        self.session = session
        self.second_run = second_run

    def image(self, row: int) -> Response:
        """A JPEG, or the reason why the file cannot be shown."""
        path = self.session.images[self.checked(row)]
        content: bytearray | str = "no such file"
        if os.path.isfile(path):
            (content,) = decode_in_processes([path], size=SIDE, channels=None, workers=1)
        if isinstance(content, str):
            return Response(content, status=415, mimetype="text/plain")
        return Response(bytes(content), mimetype="image/jpeg")

    def classes(self) -> Response:
        name = self.session.run.resolve().name
        return jsonify(run=name, classes=self.session.board.target.classes)

    def state(self) -> Response:
        return self.reply(request.args.get("window", ""))

    def answer(self) -> Response:
        image = self.session.images[self.checked(field("row", int))]
        answer = Answer(image, field("label", str), field("kind", str))
        return self.reply(field("window", str), self.session.answer(answer))

    def undo(self) -> Response:
        self.session.undo(field("window", str), self.checked(field("row", int)))
        return self.reply(field("window", str))

    def adapt(self) -> Response:
        self.second_run.start()
        return self.reply(field("window", str))

    def reply(self, window: str, note: str = "") -> Response:
        if not 8 <= len(window) <= 40:
            abort(400, "a window has a name of 8 to 40 characters")
        state = self.session.state(window)
        return jsonify(state | {"adapt": self.second_run.state(), "note": note})

    def checked(self, row: int) -> int:
        return row if 0 <= row < len(self.session.images) else abort(404, "no such image")


def field(name: str, kind: type[Value]) -> Value:
    """A value of the JSON in the request."""
    try:
        body = request.get_json()
    except RecursionError:
        abort(400, "the JSON is nested too deeply")
    value = body.get(name) if isinstance(body, dict) else None
    return value if type(value) is kind else abort(400, f"{name}: expected {kind.__name__}")
