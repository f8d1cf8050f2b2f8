"""A headless Chromium, driven over its DevTools protocol: what a test needs of a page, and no more."""

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

SECONDS = 20.0
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}


def chromium() -> str:
    """Return the path of the browser.

    Raises:
        AssertionError: there is none.
    """
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    raise AssertionError("these tests need Chromium: run `make browser`, which installs it")


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator["Browser"]:
    """Run a browser with a profile of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
            "--no-proxy-server", "--remote-debugging-port=0", f"--user-data-dir={profile}",
            f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield Browser(_address(Path(profile), process))
        finally:
            process.terminate()
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(profile: Path, process: "subprocess.Popen[bytes]") -> str:
    """Return the address of the DevTools socket, which the browser writes into its profile."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, "the browser ended at its start"
        try:
            port, path = (profile / "DevToolsActivePort").read_text().split()
            return f"ws://127.0.0.1:{port}{path}"
        except (OSError, ValueError):
            time.sleep(0.05)
    raise AssertionError("the browser did not start")


class Browser:
    """A running browser.

    Args:
        address: of its DevTools socket.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    @contextmanager
    def page(self) -> Iterator["Page"]:
        """Open a page in a context of its own, without the cookies of other pages."""
        with connect(self._address, max_size=None, proxy=None, close_timeout=1) as socket:
            yield Page(socket)


class Page:
    """One page.

    Attributes:
        problems: errors of the console, exceptions, and violations of the content security policy, in order.
        requests: URLs that the page has requested.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.requests: list[str] = []
        context = self.call("Target.createBrowserContext", disposeOnDetach=True)["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            answer = json.loads(self._socket.recv(SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)
        raise AssertionError(f"no answer to {method}")

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(f"console: {params['args']}")
        elif method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {params['exceptionDetails']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"log: {params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Audits.issueAdded" and "ContentSecurityPolicy" in params["issue"]["code"]:
            self.problems.append(f"policy: {params['issue']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        self._events.append(event)

    def goto(self, url: str) -> None:
        """Open a URL, and wait until the page has loaded."""
        self._events.clear()
        error = self.call("Page.navigate", url=url).get("errorText")
        assert error is None, (url, error)
        self.loaded()

    def loaded(self) -> None:
        """Wait for the load event of a navigation that has begun."""
        end = time.monotonic() + SECONDS
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            assert time.monotonic() < end, "the page did not load"
            self._note(json.loads(self._socket.recv(SECONDS)))
        self._events.clear()

    def eval(self, script: str) -> Any:
        """Return the value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = SECONDS) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.eval(script):
                return value
            time.sleep(0.05)
        raise AssertionError(f"never true: {script}\n{self.text()[:2000]}")

    def text(self, selector: str = "body") -> str:
        """Return the text of an element as it is shown."""
        return str(self.eval(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str, navigates: bool = False) -> None:
        """Click the middle of an element with the mouse, and wait for the next page if it `navigates`."""
        x, y = self.middle(selector)
        self._events.clear()
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        if navigates:
            self.loaded()

    def hover(self, selector: str, share: float = 0.5) -> None:
        """Point at an element, at a share of its width."""
        x, y = self.middle(selector, share)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def middle(self, selector: str, share: float = 0.5) -> tuple[float, float]:
        """Scroll to an element, and return the middle of its height, and a share of its width."""
        found = self.eval(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)}); if (!found) return null;"
            f" found.scrollIntoView({{block: 'center'}}); const box = found.getBoundingClientRect();"
            f" return [box.x + box.width * {share}, box.y + box.height / 2]; }})()"
        )
        assert found, f"no element {selector}\n{self.text()[:2000]}"
        return found[0], found[1]

    def type(self, text: str) -> None:
        """Type a text into the field that has the focus, or gets it."""
        self.wait("document.activeElement instanceof HTMLInputElement")
        self.call("Input.insertText", text=text)

    def press(self, key: str, navigates: bool = False) -> None:
        """Press a key."""
        self._events.clear()
        text = {"Enter": "\r", " ": " "}.get(key)
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        down = {**fields, "type": "keyDown", **({"text": text} if text else {})}
        self.call("Input.dispatchKeyEvent", **down)
        self.call("Input.dispatchKeyEvent", **fields, type="keyUp")
        if navigates:
            self.loaded()

    def scheme(self, name: str) -> None:
        """Prefer a color scheme: "dark" or "light"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, whole: bool = False) -> bytes:
        """Return a PNG of what is visible, or of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])
