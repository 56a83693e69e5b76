"""Headless Chromium, driven over its DevTools protocol through two pipes; no library is needed."""

import itertools
import json
import os
import pathlib
import shutil
import subprocess
import time

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One page of a browser of its own. A context manager.

    errors: what the page wrote to its console as an error or a warning, and uncaught exceptions.
    requests: addresses that it asked for.
    """

    def __init__(self, profile: pathlib.Path):
        self._profile = profile
        self._ids, self._buffer, self._session = itertools.count(1), b"", {}
        self.errors: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> "Page":
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # It reads commands from descriptor 3 and writes answers to 4.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--remote-debugging-pipe", f"--user-data-dir={self._profile}")  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", command, PROGRAM, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def send(self, method: str, **params) -> dict:
        """The result of a command; notes the events that come before it."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
        return message

    def open(
        self, file: pathlib.Path, width: int = 1280, dark: bool = False, fragment: str = ""
    ) -> None:
        """Loads a file in a window of this width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        if fragment:  # from the same file the browser would only scroll
            self.send("Page.navigate", url="about:blank")
        self.run("window.isLeft = true")
        self.send("Page.navigate", url=file.absolute().as_uri() + f"#{fragment}" * bool(fragment))
        deadline = time.monotonic() + 300
        while not self.run("!window.isLeft && document.readyState == 'complete'"):
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.05)

    def run(self, script: str):
        """Return the value of an expression; of a promise, its result."""
        done = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({selector!r})?.textContent")

    def press(self, *keys: str) -> None:
        """Keys by name, as "ArrowRight" or "j"."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def point(self, selector: str, click: bool = True, nth: int = 0, at=None) -> None:
        """Moves the mouse to the middle of an element, or to pixels in it, and clicks."""
        script = f"""(() => {{
            const node = document.querySelectorAll({selector!r})[{nth}];
            node.scrollIntoView({{block: "center"}});
            const box = node.getClientRects()[0];
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
        x, y = self.run(script)
        if at is not None:
            box = f"document.querySelectorAll({selector!r})[{nth}].getBoundingClientRect()"
            x = self.run(f"{box}.left") + at[0]
            y = self.run(f"{box}.top") + at[1]
        for kind in ["mouseMoved", *["mousePressed", "mouseReleased"] * click]:
            clicks = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **clicks)
