"""Headless Chromium for tests of pages, driven by the DevTools protocol over a pipe. No package is needed."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--disable-extensions",
    # Shared memory is small in many containers.
    "--disable-dev-shm-usage",
    # Each page is painted and its timers run as if its window were in front.
    "--disable-backgrounding-occluded-windows",
    "--disable-background-timer-throttling",
    "--disable-renderer-backgrounding",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)
# Chromium reads commands from file descriptor 3 and writes answers to 4.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
SECONDS = 60  # against hanging only
# What an expression gets whose page is being replaced.
GONE = ("Inspected target navigated or closed", "Execution context was destroyed", "Cannot find context")


def chromium():
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None) if os.name == "posix" else None


class Replaced(AssertionError):
    """A page was replaced by another one before an expression had a value."""


class Browser:
    """A Chromium with an empty profile; a context manager."""

    def __enter__(self):
        import fcntl  # POSIX only, like the pipe

        self.profile = tempfile.mkdtemp(prefix="chromium-")
        ours, theirs = zip(*(reversed(os.pipe()), os.pipe()), strict=True)
        self.out, self.input = ours
        # Numbers that the two that Chromium uses cannot overwrite.
        passed = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in theirs]
        command = [sys.executable, "-S", "-c", LAUNCH, *map(str, passed), chromium(), *FLAGS]
        self.process = subprocess.Popen(
            [*command, f"--user-data-dir={self.profile}", "about:blank"],
            pass_fds=passed,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (*theirs, *passed):
            os.close(end)
        self.poll = select.poll()
        self.poll.register(self.input, select.POLLIN)
        self.count, self.buffer, self.events = 0, b"", []
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError, AssertionError):
            self.send("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.out)
        os.close(self.input)
        shutil.rmtree(self.profile, ignore_errors=True)

    def send(self, method, session=None, **params):
        """Send a command and return its result; events that come before it are kept."""
        self.count += 1
        number = self.count
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self.out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while True:
            found = self._read(method, end)
            if found.get("id") == number:
                if (said := found.get("error")) is not None:
                    gone = any(text in said.get("message", "") for text in GONE)
                    raise (Replaced if gone else AssertionError)(f"{method}: {said}")
                return found["result"]
            self.events.append(found)

    def restart(self):
        """Start anew, after a command that was not answered."""
        self.process.kill()
        self.__exit__()
        self.__enter__()

    def page(self, url, **options):
        """Open a page in a new browser context, without cookies or storage of other pages."""
        return Page(self, url, **options)

    def _read(self, method, end):
        while b"\0" not in self.buffer:
            # Events of a page may come all the time.
            left = end - time.monotonic()
            ready = left > 0 and self.poll.poll(1000 * left)
            assert ready, f"Chromium does not answer {method}"
            data = os.read(self.input, 1 << 20)
            assert data, "Chromium has ended"
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)


class Page:
    """One page; a context manager.

    ``width`` and ``height`` are those of the window, ``dark`` is the color scheme, ``touch`` emulates a phone.
    """

    def __init__(self, browser, url, *, width=1280, height=900, dark=False, touch=False, scale=1):
        self.browser = browser
        self.context = browser.send("Target.createBrowserContext")["browserContextId"]
        target = browser.send("Target.createTarget", url="about:blank", browserContextId=self.context)["targetId"]
        self.session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        # Otherwise a page behind another one may leave an input unanswered.
        self.send("Page.bringToFront")
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)
        self.size(width, height, touch, scale)
        self.scheme(dark)
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.send_browser("Target.disposeBrowserContext", browserContextId=self.context)
        except AssertionError:
            # Chromium does not answer if the page is being replaced, as after a failure within ``reload``.
            self.browser.restart()
            raise

    def send(self, method, **params):
        return self.browser.send(method, self.session, **params)

    def send_browser(self, method, **params):
        return self.browser.send(method, **params)

    def size(self, width, height, touch=False, scale=1):
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=touch
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)

    def scheme(self, dark):
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def js(self, expression):
        """The value of an expression; a promise is awaited."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"]["exception"].get("description", found))
        return found["result"].get("value")

    def until(self, expression):
        """Wait until an expression is true, and return it."""
        end = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(Replaced):
                if found := self.js(expression):
                    return found
            assert time.monotonic() < end, f"it did not happen: {expression}"
            time.sleep(0.02)

    def reload(self):
        self.js("window.old = true")
        self.send("Page.reload")
        self.until("!window.old && document.readyState === 'complete'")

    def box(self, selector):
        """The box (x, y, width, height) of an element, scrolled into the window, once it is shown."""
        return self.until(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "if (!e || !e.offsetParent) return null; e.scrollIntoView({block: 'center', behavior: 'instant'}); "
            "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )

    def click(self, selector):
        x, y, width, height = self.box(selector)
        self.click_at(x + width / 2, y + height / 2)

    def click_at(self, x, y):
        self.drag([(x, y)])

    def drag(self, points):
        """Press the mouse at the first point, move along the others, and let go."""
        button = {"button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type="mousePressed", x=points[0][0], y=points[0][1], **button)
        for x, y in points[1:]:
            self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="left", buttons=1)
        self.send("Input.dispatchMouseEvent", type="mouseReleased", x=points[-1][0], y=points[-1][1], **button)

    def swipe(self, points):
        """Move a finger along points."""
        for i, (x, y) in enumerate(points):
            name = "touchMove" if i else "touchStart"
            self.send("Input.dispatchTouchEvent", type=name, touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def write(self, selector, text):
        """Replace the content of a field by typing."""
        self.click(selector)
        self.js("document.activeElement.select()")
        if text:
            self.send("Input.insertText", text=text)
        else:
            self.press("Delete")

    def press(self, key, modifiers=0, text=""):
        """Press a key; modifiers: 1 alt, 2 ctrl, 8 shift."""
        codes = {"Enter": 13, "Escape": 27, "Delete": 46, "Tab": 9, " ": 32, "Home": 36, "End": 35}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        options = {"key": key, "modifiers": modifiers, "windowsVirtualKeyCode": codes.get(key, 0)}
        self.send("Input.dispatchKeyEvent", type="keyDown", **options, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **options)

    def logged(self):
        """Errors of the page's scripts, of its policy and of the console; and the addresses that it asked for."""
        self.js("0")
        errors, addresses = [], []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            method, params = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                errors.append(params["exceptionDetails"].get("exception", {}).get("description", str(params)))
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".strip())
            elif method == "Network.requestWillBeSent":
                addresses.append(params["request"]["url"])
        return errors, addresses

    def picture(self, path, whole=True):
        """Save a PNG of the window, or of the whole page."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(found["data"]))
