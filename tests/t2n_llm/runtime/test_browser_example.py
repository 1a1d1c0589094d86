"""`examples/browser`: a page in Chromium says what `t2n-llm generate` says, token by token. Built by the example's own script."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from t2n_llm.runtime.generate import ExportedModel
from t2n_llm.runtime.sampling.options import Sampling

EXAMPLE = Path(__file__).parents[3] / "examples" / "browser"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", EXAMPLE / "target"))
PROGRAM = TARGET / "wasm32-unknown-unknown" / "release" / "generate_in_browser.wasm"
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "google-chrome", "chromium-browser"])), None)

pytestmark = [
    pytest.mark.skipif(not PROGRAM.exists(), reason="examples/browser is not built"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]


@dataclass(frozen=True)
class Page:
    """A tab of Chromium, told what to do over its pipe of JSON messages (the DevTools protocol)."""

    orders: BinaryIO
    answers: BinaryIO
    numbers: Iterator[int] = field(default_factory=count)
    session: str = ""

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self.numbers)
        order: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self.session:
            order["sessionId"] = self.session
        self.orders.write(json.dumps(order).encode() + b"\0")
        while True:
            answer = json.loads(_message(self.answers))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]  # type: ignore[no-any-return]

    def tab(self, address: str) -> Page:
        target = self.send("Target.createTarget", url=address)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self.orders, self.answers, self.numbers, session)

    def value(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def settled(self, left: str = "loading") -> str:
        """The state that the page comes to, having left another: ready, absent or failed."""
        deadline = time.monotonic() + 120
        while (state := self.value("document.body?.dataset.state ?? 'loading'")) in (left, "loading", "writing"):
            assert time.monotonic() < deadline, state
            time.sleep(0.05)
        return str(state)

    def write(self, prompt: str, tokens: int) -> str:
        """What the page writes after a prompt."""
        self.value(f"element('most').value = {tokens}; element('prompt').value = {json.dumps(prompt)}; go.click()")
        assert self.settled() == "ready", self.value("element('status').textContent")
        written = self.value("element('text').textContent")
        assert written.startswith(prompt)
        return str(written[len(prompt) :])


def _message(answers: BinaryIO) -> bytes:
    read = bytearray()
    while (byte := answers.read(1)) != b"\0":
        assert byte, "Chromium ended"
        read += byte
    return bytes(read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    (orders_out, orders_in), (answers_out, answers_in) = os.pipe(), os.pipe()
    profile = tmp_path_factory.mktemp("profile")
    # Chromium takes orders from descriptor 3 and answers on 4; not every sh knows descriptors of two digits.
    redirected = f'exec "$0" "$@" 3<&{orders_out} 4>&{answers_in}'
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        ["bash", "-c", redirected, str(CHROMIUM), *options],
        pass_fds=(orders_out, answers_in),
        stderr=subprocess.DEVNULL,
    )
    os.close(orders_out)
    os.close(answers_in)
    with open(orders_in, "wb", buffering=0) as orders, open(answers_out, "rb") as answers:
        browser = Page(orders, answers)
        yield browser
        browser.send("Browser.close")
        process.wait(timeout=20)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(real_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page with the export beside it, on a plain server; its address."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(EXAMPLE / "index.html", folder)
    shutil.copy(PROGRAM, folder)
    (folder / "model").symlink_to(real_export)
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def page(browser: Page, site: str) -> Page:
    page = browser.tab(site)
    assert page.settled() == "ready", page.value("element('status').textContent")
    return page


@pytest.mark.parametrize("prompt", ["The sea was calm", "Once upon a time there was a — ", "x " * 300])
def test_it_says_what_python_says(prompt: str, page: Page, real_export: Path) -> None:
    """The last prompt is longer than a chunk."""
    wanted = "".join(
        ExportedModel.open(real_export).generate(prompt, max_new_tokens=40, sampling=Sampling(greedy=True), chat=False)
    )
    assert page.write(prompt, 40) == wanted
    assert "wrote 40" in page.value("element('speed').textContent")


def test_an_address_can_ask(browser: Page, page: Page, site: str) -> None:
    asking = browser.tab(site + "?prompt=The+sea&tokens=8&go")
    assert asking.settled() == "ready"
    assert asking.value("element('text').textContent") == "The sea" + page.write("The sea", 8)


def test_it_stops_when_told(page: Page) -> None:
    page.value("element('most').value = 1000; go.click()")
    page.value("new Promise((done) => new MutationObserver(() => done()).observe(speed, { childList: true }))")
    page.value("go.click()")
    assert page.settled() == "ready"
    written = int(page.value("speed.textContent.match(/wrote (\\d+)/)[1]"))
    assert 0 < written < 900


def test_mistakes_are_told(browser: Page, page: Page, site: str) -> None:
    page.value("element('prompt').value = 'x '.repeat(700); go.click()")
    assert page.settled() == "failed"
    assert "tokens, the model 1024 positions" in page.value("element('status').textContent")
    assert page.write("The sea", 4)  # the model is still there
    assert browser.tab(site + "?model=nowhere/").settled() == "absent"


def test_a_folder_is_opened(browser: Page, page: Page, site: str, real_export: Path, tmp_path: Path) -> None:
    other = browser.tab(site + "?model=nowhere/")
    assert other.settled() == "absent"
    folder = other.send("Runtime.evaluate", expression="element('folder')")["result"]["objectId"]
    other.send("DOM.setFileInputFiles", objectId=folder, files=[str(real_export)])
    assert other.settled(left="absent") == "ready", other.value("element('status').textContent")
    assert other.write("The sea", 8) == page.write("The sea", 8)


def test_the_engine_imports_nothing(page: Page) -> None:
    """So it reaches neither files nor the network."""
    module = "fetch('generate_in_browser.wasm').then((it) => it.arrayBuffer()).then((it) => WebAssembly.compile(it))"
    assert page.value(f"{module}.then((it) => WebAssembly.Module.imports(it).length)") == 0
