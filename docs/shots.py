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
import urllib.parse
from pathlib import Path

SITE = Path(__file__).parent.parent / "site"
PAGES = {
    "index": "index.html",
    "quickstart": "quickstart.html",
    "usage": "usage.html",
    "faults": "faults/index.html",
    "benchmarks": "benchmarks.html",
    "search": "index.html?q=" + urllib.parse.quote("UnpicklingError"),
}
WIDTHS = {"wide": (1360, 1500), "narrow": (500, 1500)}
"""Chromium's windows are 500 pixels wide at least."""

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--timeout=6000"),  # the search starts in a worker of its own
)


class _Quiet(http.server.SimpleHTTPRequestHandler):
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
