"""A tab of a real Chromium over the Chrome DevTools Protocol: as much of it as these tests need.

Specification: https://chromedevtools.github.io/devtools-protocol/ (Page, Runtime, Log, Network, Emulation, Input).
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage",
    "--no-default-browser-check", "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-port=0",
)  # fmt: skip
START_SECONDS, ANSWER_SECONDS = 180, 180  # a busy machine is slow, a hanging browser is not waited for


class Browser:
    """One Chromium with a profile of its own."""

    def __init__(self, program: str) -> None:
        self.profile = Path(tempfile.mkdtemp(prefix="topoflight-chromium-"))
        self.process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.port = self._port()

    def _port(self) -> int:
        file, end = self.profile / "DevToolsActivePort", time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            lines = file.read_text().splitlines() if file.exists() else []
            if len(lines) > 1:  # the port, then a path: the first line is whole
                return int(lines[0])
            if self.process.poll() is not None:
                raise RuntimeError(f"chromium ended with {self.process.returncode}")
            time.sleep(0.1)
        raise TimeoutError(f"chromium opened no debugging port within {START_SECONDS} s")

    def tab(self, **options: Any) -> Tab:
        """A new tab; options go to `Tab.emulate`."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:  # noqa: S310
            made = json.load(answer)
        return Tab(made["webSocketDebuggerUrl"], **options)

    def close(self) -> None:
        """End the browser and remove its profile."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)


class Tab:
    """One page: goes, asks, types, and remembers every request and every complaint."""

    def __init__(self, address: str, *, width: int = 1200, height: int = 900, dark: bool = False, scripts: bool = True):
        self._open = ExitStack()
        self._wire = self._open.enter_context(
            connect(address, max_size=None, open_timeout=ANSWER_SECONDS, ping_interval=None)
        )
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)
        # A new tab hides the one before it, and a hidden page draws nothing and renews nothing: none shall be hidden.
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        if not scripts:
            self.ask("Emulation.setScriptExecutionDisabled", value=True)

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self.ask("Page.close")
        self._open.close()

    def ask(self, method: str, **params: Any) -> Any:
        """One command and its answer."""
        self._number += 1
        number = self._number
        self._wire.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = self._receive(ANSWER_SECONDS)
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def _receive(self, seconds: float) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._wire.recv(timeout=seconds))
        if "method" in message:
            self._note(message["method"], message["params"])
            self._events.append(message)
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def loaded(self, loader: str | None = None) -> None:
        """Wait for the load event of that document, by default of a navigation that was begun after the last wait."""
        end = time.monotonic() + ANSWER_SECONDS
        while not any(_is_load(event, loader) for event in self._events):
            self._receive(max(0.1, end - time.monotonic()))
        self._events.clear()

    def go(self, url: str) -> Tab:
        """Open an address and wait until it is loaded: itself, as the page before may say only now that it is."""
        self._events.clear()
        begun = self.ask("Page.navigate", url=url)
        if failed := begun.get("errorText"):
            raise RuntimeError(f"{url}: {failed}")
        self.loaded(begun["loaderId"])
        return self

    def run(self, script: str) -> Any:
        """The value of an expression, promises awaited."""
        answer = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """What a person reads there."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + ANSWER_SECONDS
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {script}")
            time.sleep(0.1)

    def key(self, name: str, code: int) -> None:
        """Press and release one key."""
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code,
                     text="\r" if name == "Enter" and kind == "keyDown" else "")  # fmt: skip

    def picture(self, height: int, width: int = 1200) -> bytes:
        """The top of the page as a PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


def _is_load(event: dict[str, Any], loader: str | None) -> bool:
    if loader is None:
        return bool(event["method"] == "Page.loadEventFired")
    params = event["params"]
    return event["method"] == "Page.lifecycleEvent" and (params["name"], params["loaderId"]) == ("load", loader)
