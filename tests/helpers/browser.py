"""Drives a headless Chromium over WebDriver's HTTP protocol. Only the browser and its driver are needed."""

import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

DRIVER = shutil.which("chromedriver")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = None if DRIVER and BROWSER else "no Chromium with chromedriver here (Debian: chromium, chromium-driver)"
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's key of a reference to an element
ENTER, ESCAPE, TAB, SHIFT = "\ue007", "\ue00c", "\ue004", "\ue008"


class Browser:
    def __init__(self, session: str):
        self._session = session

    def _post(self, path: str, **given):
        answer = httpx.post(f"{self._session}/{path}", json=given, timeout=60).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def new_tab(self) -> None:
        """Switch to a new tab, whose session storage is empty."""
        made = self._post("window/new", type="tab")["handle"]
        httpx.delete(f"{self._session}/window", timeout=60)
        self._post("window", handle=made)

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def run(self, script: str, *args):
        """Run JavaScript in the page and return its result."""
        return self._post("execute/sync", script=script, args=list(args))

    def text(self, css: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", css)

    def press(self, *keys: str) -> None:
        """Press keys; they go to the element that has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def write(self, text: str) -> None:
        self.press(*text)

    def click(self, css: str) -> None:
        found = self._post("element", using="css selector", value=css)[ELEMENT]
        self._post(f"element/{found}/click")

    def until(self, script: str, *args, seconds: float = 20.0):
        end = time.monotonic() + seconds
        while not (value := self.run(script, *args)):
            assert time.monotonic() < end, f"it did not come to {script}: {self.run('return document.body.innerText')}"
            time.sleep(0.02)
        return value

    def log(self) -> list[dict]:
        """Return the console's messages since the last call, including exceptions and failed requests."""
        return self._post("se/log", type="browser")

    def devtools(self, command: str, **given) -> None:
        """Run a command of Chromium's DevTools protocol."""
        self._post("goog/cdp/execute", cmd=command, params=given)

    def size(self, width: int, height: int, phone: bool = False) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )


@contextmanager
def browser(profile: Path, *flags: str):
    """Open a browser with an empty ``profile``, which is a folder of its own."""
    process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = iter(process.stdout.readline, "")
        port = next(found[1] for line in lines if (found := re.search(r"started successfully on port (\d+)", line)))
        options = {
            "binary": BROWSER,
            "args": ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", *QUIET, *flags]
            + [f"--user-data-dir={profile}"],
        }
        asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = httpx.post(
            f"http://127.0.0.1:{port}/session", json={"capabilities": {"alwaysMatch": asked}}, timeout=60
        ).json()["value"]
        session = f"http://127.0.0.1:{port}/session/{answer['sessionId']}"
        try:
            yield Browser(session)
        finally:
            httpx.delete(session, timeout=60)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
