"""docs/images/page.png: the page of scripts/web.sh in Chromium, with the answer to the question that it opens with.

    build/venv/bin/python web/picture.py [PAGE [PICTURE]]
"""

import pathlib
import sys

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT = pathlib.Path(__file__).resolve().parent.parent
page = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "build/web/shardwright.html"
picture = sys.argv[2] if len(sys.argv) > 2 else str(ROOT / "docs/images/page.png")

options = webdriver.ChromeOptions()
for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,2200"):
    options.add_argument(flag)
driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
try:
    driver.get(page.as_uri())
    WebDriverWait(driver, 300).until(lambda d: "Done in" in d.find_element(By.TAG_NAME, "body").text)
    driver.save_screenshot(picture)
finally:
    driver.quit()
