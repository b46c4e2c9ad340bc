"""A page in headless Chromium, driven over its DevTools protocol: what it shows, complains of and asks for."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# The sandbox needs user namespaces, which root in a container has not; the pages are our own.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0", "about:blank",
)  # fmt: skip


class Page:
    """One tab. `complaints` are console errors and exceptions, `asked_for` the addresses that the page wanted."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self.asked_for: list[str] = []
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._number = 0
        self._reader = asyncio.create_task(self._read())

    async def open(self, file: Path, width: int, *, height: int = 900, dark: bool = False) -> None:
        """Load a file at a device width in CSS pixels, and wait until it has drawn."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **device)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded.clear()
        await self.send("Page.navigate", url=file.resolve().as_uri())
        await asyncio.wait_for(self._loaded.wait(), 60)
        await self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    async def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, a promise awaited."""
        told = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def screenshot(self) -> bytes:
        """The whole page as PNG."""
        told = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(told["data"])

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        return await asyncio.wait_for(answer, 60)

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                answer = self._answers.pop(told["id"])
                if "error" in told:
                    answer.set_exception(RuntimeError(str(told["error"])))
                else:
                    answer.set_result(told["result"])
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {params['message']}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked_for.append(params["request"]["url"])


@asynccontextmanager
async def chromium_page(profile: Path) -> AsyncIterator[Page]:
    """A tab of a browser with a fresh profile, which ends with the block."""
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM, *FLAGS, f"--user-data-dir={profile}",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env=os.environ | {"HOME": str(profile)},
    )  # fmt: skip
    try:
        assert browser.stderr is not None
        async with asyncio.timeout(90):
            port = None
            while port is None:
                line = (await browser.stderr.readline()).decode(errors="replace")
                assert line, "the browser ended before it listened"
                port = re.search(r"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line)
        drained = asyncio.create_task(browser.stderr.read())  # a full pipe would stop the browser
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port[1]}/json/list") as listed:
                (tab,) = [t for t in await listed.json() if t["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                try:
                    yield page
                finally:
                    page._reader.cancel()
        browser.terminate()
        await drained
    finally:
        if browser.returncode is None:
            browser.kill()
        await browser.wait()
