"""Pages as Firefox shows them: a headless Firefox, driven over its own remote protocol (Marionette), without a geckodriver.

A message is its length, a colon, and JSON: [0, number, name, parameters] asks, [1, number, error, result] answers.
"""

import base64
import json
import os
import shutil
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
# Nothing leaves the machine, no page opens by itself, and Firefox picks a free port, which it writes into its profile.
PREFERENCES = {
    "marionette.port": 0,
    "app.update.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "browser.startup.homepage": "about:blank",
    "datareporting.policy.dataSubmissionEnabled": False,
    "datareporting.policy.firstRunURL": "",
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "toolkit.telemetry.reportingpolicy.firstRun": False,
}
# Seconds for a start and for each answer, on a machine that has other work.
PATIENCE_S = 60


class Firefox:
    """A window. Calls raise AssertionError where Firefox answers with an error."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._file = self._socket.makefile("rb")
        self._number = 0
        self._answer()  # the greeting
        self.ask("WebDriver:NewSession", capabilities={})

    def close(self) -> None:
        """End Firefox."""
        self.ask("Marionette:Quit", flags=["eForceQuit"])
        self._file.close()
        self._socket.close()

    def ask(self, name: str, **parameters: object) -> object:
        """The result of a command of the protocol."""
        self._number += 1
        message = json.dumps([0, self._number, name, parameters]).encode()
        self._socket.sendall(b"%d:%b" % (len(message), message))
        _, number, error, result = self._answer()
        assert number == self._number
        assert error is None, error
        return result["value"] if isinstance(result, dict) and set(result) == {"value"} else result

    def _answer(self):
        length = b""
        while (byte := self._file.read(1)) != b":":
            assert byte, "Firefox has gone"
            length += byte
        return json.loads(self._file.read(int(length)))

    def open(self, page: Path, width: int) -> None:
        """Open the page from the file system, in a frame of that width; what follows is asked of the page in the frame."""
        frame = page.with_name("frame.html")
        frame.write_text(f'<!doctype html><iframe style="width:{width}px;height:2000px;border:0" src="{page.name}"></iframe>')
        self.ask("WebDriver:Navigate", url=frame.as_uri())
        self.ask("WebDriver:SwitchToFrame", id=0)

    def run(self, script: str) -> object:
        """What a script returns that runs beside the page's own."""
        return self.ask("WebDriver:ExecuteScript", script=script, args=[])

    def be_dark(self, dark: bool) -> None:
        """Tell pages that the system is dark, or light."""
        self.ask("Marionette:SetContext", value="chrome")
        name = "layout.css.prefers-color-scheme.content-override"
        self.run(f"Services.prefs.setIntPref('{name}', {0 if dark else 1})")
        self.ask("Marionette:SetContext", value="content")

    def press(self, *keys: str) -> None:
        """Press and let go one key after the other."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("WebDriver:PerformActions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def picture(self, selector: str) -> np.ndarray:
        """What an element of the page looks like: uint8[height, width, channels]."""
        element = self.ask("WebDriver:FindElement", using="css selector", value=selector)
        shot = self.ask("WebDriver:TakeScreenshot", id=next(iter(element.values())), full=False)
        return pixels(base64.b64decode(shot))


@contextmanager
def firefox(folder: Path) -> Iterator[Firefox]:
    """A headless Firefox with a profile of its own in the folder; ended with the block."""
    profile = folder / "profile"
    profile.mkdir()
    (profile / "user.js").write_text("".join(f"user_pref({json.dumps(k)}, {json.dumps(v)});\n" for k, v in PREFERENCES.items()))
    command = [
        FIREFOX, "--headless", "--marionette", "--remote-allow-system-access", "--no-remote", "--profile", str(profile),
        "about:blank",
    ]  # fmt: skip
    environment = os.environ | {"HOME": str(folder), "MOZ_CRASHREPORTER_DISABLE": "1"}
    with (folder / "firefox.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            window = Firefox(_port(profile, process))
            try:
                yield window
            finally:
                window.close()
                process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()


def _port(profile: Path, process: subprocess.Popen) -> int:
    written = profile / "MarionetteActivePort"
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if written.exists() and (text := written.read_text().strip()):
            return int(text)
        assert process.poll() is None, (profile.parent / "firefox.log").read_text()
        time.sleep(0.05)
    raise AssertionError("Firefox says no port: " + (profile.parent / "firefox.log").read_text())


def pixels(png: bytes) -> np.ndarray:
    """The pixels of a PNG with 8 bits a channel and no interlacing, as Firefox writes it: uint8[height, width, channels]."""
    at, data, width, height, channels = 8, b"", 0, 0, 0
    while at < len(png):
        length, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height = int.from_bytes(body[:4], "big"), int.from_bytes(body[4:8], "big")
            channels = {2: 3, 6: 4}[body[9]]
            assert (body[8], body[12]) == (8, 0)
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    found = np.zeros((height + 1, width + 1, channels), np.int64)  # a row above and a pixel to the left of all, of zeros
    for y in range(height):
        above, raw = found[y], rows[y, 1:].reshape(width, channels).astype(np.int64)
        match rows[y, 0]:
            case 0:
                found[y + 1, 1:] = raw
            case 1:
                found[y + 1, 1:] = np.cumsum(raw, axis=0) % 256
            case 2:
                found[y + 1, 1:] = (raw + above[1:]) % 256
            case kind:
                _from_the_left(found[y + 1], raw, above, paeth=kind == 4)
    return found[1:, 1:].astype(np.uint8)


def _from_the_left(row: np.ndarray, raw: np.ndarray, above: np.ndarray, *, paeth: bool) -> None:
    """Fill the row pixel by pixel, each predicted by its neighbours: their mean, or the one nearest to left + up - corner."""
    for x in range(len(raw)):
        left, up, corner = row[x], above[x + 1], above[x]
        if paeth:
            far = np.abs([up - corner, left - corner, left + up - 2 * corner])
            guess = np.where((far[0] <= far[1]) & (far[0] <= far[2]), left, np.where(far[1] <= far[2], up, corner))
        else:
            guess = (left + up) // 2
        row[x + 1] = (raw[x] + guess) % 256
