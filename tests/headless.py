"""A headless Chromium, driven over the pipe of its DevTools protocol: nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    return next(
        (
            p
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (p := shutil.which(name))
        ),
        None,
    )


class Browser:
    """Tabs, one of which is driven. `errors` and `requests` fill as the pages run."""

    def __init__(self, program: str, profile: Path, patience: float = 60.0) -> None:
        self.patience = patience
        self.buffer = b""
        self.count = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        commands, self.out = os.pipe()
        self.inp, answers = os.pipe()
        # Chromium reads its commands from descriptor 3 and answers on 4; the shell puts our pipes there.
        script = f'exec "$@" 3<&{commands} 4>&{answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self.new_tab()

    session: str | None = None
    """The tab that is driven; set it to go back to an earlier one."""

    def new_tab(self) -> str | None:
        """Open a tab and drive it from now on."""
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self.session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def receive(self) -> dict[str, Any]:
        """The next message; events are noted on the way."""
        end = time.monotonic() + self.patience
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.inp], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self.inp, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError(f"no answer from Chromium (exit code {self.process.poll()})")
            self.buffer += part
        line, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(line)
        self.note(message.get("method", ""), message.get("params", {}))
        return message

    def note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:400])
        elif event == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(json.dumps(params["args"])[:400])
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(
        self, page: Path | str, width: int, height: int = 844, *, dark: bool = False
    ) -> None:
        """Load a file or an address in a window of this size, on a machine that prefers light or dark."""
        address = page if isinstance(page, str) else page.resolve().as_uri()
        self.errors.clear()
        self.requests.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        if problem := self.call("Page.navigate", url=address).get("errorText"):
            raise RuntimeError(f"{page}: {problem}")
        self.wait_for(
            "location.protocol !== 'about:' && document.documentElement?.dataset.ready === '1'"
        )

    def wait_for(self, condition: str) -> None:
        """Until a JavaScript expression is true."""
        end = time.monotonic() + self.patience
        while not self.run(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"not in time: {condition}")
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression on the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:600])
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """A real key press, to whatever has the focus."""
        codes = {"Enter": (13, "\r"), "Tab": (9, ""), "ArrowDown": (40, ""), "Escape": (27, "")}
        code, text = codes.get(key, (ord(key[0].upper()), key))
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        os.close(self.out)
        os.close(self.inp)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
