"""The page beside a server, as `explore:` of its configuration has it; a server that is slow, gone.

Needs Chromium, as tests/explore/browser.py says.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from .browser import a_page, expect, opened, shown
from .memory import Digits

DUALFORM = Path(sys.executable).with_name("dualform")
CONFIG = "listen: 127.0.0.1:0\nexplore: 127.0.0.1:0\nindexes: {{digits: {}}}\n"


@pytest.mark.slow
def test_a_server_that_is_slow_or_gone_is_said(digits: Digits, tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text(CONFIG.format(digits.path))
    log = tmp_path / "log"
    server = warm.start(
        "dualform", "serve", "--config", tmp_path / "server.yaml", errors=log.open("w+b")
    )
    other = None
    try:
        said = [server.stdout.readline() for _ in range(2)]
        (listening,) = re.findall(r"listening on (\S+)", said[0])
        (address,) = re.findall(r"exploring at (\S+)", said[1])
        other = subprocess.Popen(
            [DUALFORM, "explore", "--server", listening, "--port", "0"], stdout=subprocess.PIPE
        )
        with a_page() as page:
            opened(page, address, "example=7")
            best = page.locator(".cards.weight").inner_text()
            assert "example" in best
            os.kill(server.pid, signal.SIGSTOP)
            page.get_by_title("ask about example 3", exact=True).click()
            expect(page.get_by_role("status").first).to_contain_text("Asking for")
            expect(page.get_by_role("status").first).to_contain_text(" s)")
            with shown(page):
                page.get_by_role("button", name="Cancel").click()
            expect(page.get_by_role("status").first).to_have_text("Given up.")
            os.kill(server.pid, signal.SIGCONT)
            with shown(page):
                page.get_by_role("button", name="Try again").click()
            expect(page.get_by_role("heading", name="Example 3", exact=True)).to_be_visible()
            assert other.stdout is not None
            found = re.search(r"exploring at (\S+)", other.stdout.readline().decode())
            assert found
            server.terminate()
            assert server.wait(timeout=60) == 0, log.read_text()
            opened(page, found[1], "example=7")
            expect(page.locator(".trouble")).to_contain_text(listening.rpartition(":")[2])
            expect(page.get_by_role("button", name="Try again")).to_be_visible()
    finally:
        server.kill()
        server.wait()
        server.close()
        if other is not None and other.stdout is not None:
            other.kill()
            other.wait()
            other.stdout.close()
