"""A relay in front of the stand-in API server: slow, silent, or with a certificate of one's choice.

Specification: ssl(3) through the standard library; the relay knows nothing of what it carries.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path


class Relay:
    """Listens on a port of its own and carries bytes both ways. `with Relay(port) as relay: relay.url`."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay_seconds = 0.0  # before each piece of an answer
        self.silent = False  # new connections are taken and nothing is ever said
        self.tls: ssl.SSLContext | None = None
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self.break_off()

    def break_off(self) -> None:
        """End every connection; the next ones meet the relay as it is now."""
        held, self._open = self._open, []
        for one in held:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        if self.silent:
            self._open.append(client)
            return
        with contextlib.suppress(OSError):
            if self.tls:
                client = self.tls.wrap_socket(client, server_side=True)
            self._open.append(client)
            server = socket.create_connection(("127.0.0.1", self.target))
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            self._pump(server, client, True)

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError, ValueError):
            while piece := source.recv(65536):
                if answers:
                    time.sleep(self.delay_seconds)
                sink.sendall(piece)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def certificate(folder: Path, days: int) -> ssl.SSLContext:
    """A server's context with a certificate for 127.0.0.1 from one authority, valid for that many days from now."""
    authority, key, request, made = (folder / name for name in ("ca.pem", "key.pem", "request.pem", f"{days}.pem"))
    extensions = folder / "extensions"
    if not authority.exists():
        _openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout",
                 str(folder / "ca-key.pem"), "-out", str(authority), "-days", "9", "-subj", "/CN=drill")  # fmt: skip
        _openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(key),
                 "-out", str(request), "-subj", "/CN=127.0.0.1")  # fmt: skip
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
    _openssl("x509", "-req", "-in", str(request), "-CA", str(authority), "-CAkey", str(folder / "ca-key.pem"),
             "-days", str(days), "-extfile", str(extensions), "-out", str(made))  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    return context


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)
