"""A page in a real browser without a window: what it says on its console, and what stands in it when its script has run."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
WHY_NOT = f"no browser: none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)"
_CONSOLE = re.compile(r"CONSOLE[:(].*")
_ASK = """<script>
setTimeout(async () => {
  const answer = element => { element.id = "answer"; document.body.append(element); };
  const line = document.createElement("pre");
  try { line.textContent = JSON.stringify(await (async () => { %s })()); }
  catch (error) { line.textContent = JSON.stringify({ failed: String(error) }); }
  answer(line);
}, 3000);
</script>"""


def ask(page: Path, question: str, *, dark: bool = False, width: int = 1280) -> tuple[list[str], Any]:
    """Open a page, run a function body in it three seconds of virtual time later; gives the console's lines and what the body returned.

    Raises:
        AssertionError: The browser gave no answer.
    """
    with tempfile.TemporaryDirectory(prefix="interlace-browser-") as folder:
        asked = Path(folder) / "page.html"
        asked.write_text(page.read_text(encoding="utf-8").replace("</body>", _ASK % question + "</body>"), encoding="utf-8")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/user",
            "--no-first-run",
            f"--window-size={width},900",
            "--virtual-time-budget=10000",
            "--enable-logging=stderr",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        ]
        ran = subprocess.run(
            [CHROMIUM or NAMES[0], *options, "--dump-dom", asked.as_uri()], capture_output=True, text=True, timeout=240, check=False
        )
    found = re.search(r'<pre id="answer">(.*?)</pre>', ran.stdout, re.S)
    assert found, f"the browser gave no answer; it said: {ran.stderr[-2000:]}"
    return _CONSOLE.findall(ran.stderr), json.loads(html.unescape(found[1]))
