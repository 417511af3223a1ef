"""docs/images/page.png: the page of scripts/web.sh in Chromium, with the answer to the question that it opens with.

    build/venv/bin/python web/picture.py [PAGE [PICTURE]]
"""

import pathlib
import sys

from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/web"))
import chromium  # noqa: E402

page = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "build/web/shardwright.html"
picture = sys.argv[2] if len(sys.argv) > 2 else str(ROOT / "docs/images/page.png")

driver = chromium.start(height=2200)
try:
    driver.get(page.as_uri())
    WebDriverWait(driver, 300).until(lambda d: "Done in" in d.find_element(By.TAG_NAME, "body").text)
    driver.save_screenshot(picture)
finally:
    driver.quit()
