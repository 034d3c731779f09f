"""Takes pictures of the built documentation in a real browser: python -m docs.shots [OUT].

Six pages at two widths, light and dark in turn. Needs Debian's `chromium`; CI has none,
and only checks what a search finds (docs/check.py).
"""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path

SITE = Path(__file__).parent.parent / "site"
PAGES = {
    "index": "index.html",
    "quickstart": "quickstart.html",
    "usage": "usage.html",
    "faults": "faults/index.html",
    "benchmarks": "benchmarks.html",
    "search": "frame/index.html?q=" + urllib.parse.quote("UnpicklingError"),
}
WIDTHS = {"wide": (1360, 1500), "narrow": (500, 1500)}
"""Chromium's windows are 500 pixels wide at least."""

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)


#: A page around a page, loaded only when the search in it has had its time: the browser takes the
#: picture when all is loaded, and waits for no worker.
WAITING_S = 6.0
FRAME = (
    '<body style="margin:0">'
    '<iframe src="{page}" style="border:0;width:100vw;height:100vh"></iframe>'
    '<img src="/wait" hidden>'
)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/wait":
            time.sleep(WAITING_S)
            self.send_error(404)
        elif self.path.startswith("/frame/"):
            page = self.path.removeprefix("/frame")
            body = FRAME.format(page=page).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


def take(out: Path) -> list[Path]:
    """Serve the site on the loopback interface and take the pictures; returns their paths."""
    browser = shutil.which("chromium")
    if browser is None:
        raise SystemExit("chromium is not installed: apt-get install chromium")
    if not (SITE / "index.html").exists():
        raise SystemExit(f"{SITE} is not built: make docs")
    out.mkdir(parents=True, exist_ok=True)
    handler = functools.partial(_Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    taken = []
    try:
        for name, page in PAGES.items():
            for width, size in WIDTHS.items():
                dark = (len(taken) + len(taken) // 2) % 2 == 1  # each page once light, once dark
                path = out / f"{name}_{width}_{'dark' if dark else 'light'}.png"
                _shot(browser, f"http://127.0.0.1:{server.server_port}/{page}", size, dark, path)
                taken.append(path)
    finally:
        server.shutdown()
    return taken


def _shot(browser: str, url: str, size: tuple[int, int], dark: bool, path: Path) -> None:
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="shots-") as profile:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", f"--screenshot={path}"]
        command += [f"--window-size={size[0]},{size[1]}"]
        command += ["--blink-settings=preferredColorScheme=0"] if dark else []
        subprocess.run([*command, url], check=True, capture_output=True, timeout=120)
    if not path.exists():
        raise SystemExit(f"the browser wrote no picture of {url}")


if __name__ == "__main__":
    for picture in take(Path(sys.argv[1] if sys.argv[1:] else ".build/shots").absolute()):
        print(picture)
