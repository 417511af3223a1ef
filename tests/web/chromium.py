"""What tests in a real browser share: Debian's Chromium, driven by Selenium. A test that imports this is skipped where it cannot run."""

import pathlib
import shutil
import sys
import time

import web_test_case

try:
    import axe_core_python
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
except ImportError as missing:
    web_test_case.skip_without(False, f"{missing.name} is not installed")

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
web_test_case.skip_without(BROWSER is not None and DRIVER is not None, "chromium or chromedriver is not installed")

# Letters that would run as markup, in four ways.
HOSTILE = "</script><script>window.broken=1</script><img src=x onerror='window.broken=2'>\"'&"
AXE = pathlib.Path(axe_core_python.__file__).parent / "axe.min.js"


def start(width=1400, height=1600, logs=("browser",)):
    """A browser without a window; the caller quits it. `logs`: of what get_log tells."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {name: "ALL" for name in logs})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


def media(driver, kind="", scheme="light"):
    """Shows the page on "print" or on a screen (""), in light or dark, until it is called again."""
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": [{"name": "prefers-color-scheme", "value": scheme}]})


def screenshot(driver, path):
    """The whole page, however high."""
    width, height = driver.execute_script("return [window.innerWidth, document.documentElement.scrollHeight]")
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})
    time.sleep(0.3)  # what is drawn for the new height
    path.parent.mkdir(parents=True, exist_ok=True)
    driver.save_screenshot(str(path))
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def contrast(a, b):
    """The ratio of WCAG 2.1 for two colours "#rrggbb"."""
    def luminance(colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(weight * (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4) for weight, v in zip((0.2126, 0.7152, 0.0722), parts))
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def accessibility_faults(driver):
    """What axe finds against WCAG 2.1, A and AA: ["rule (impact): element: what is wrong"]."""
    driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})  # the page's policy lets no script in
    result = driver.execute_async_script("""
        const done = arguments[0];
        axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}).then(
            ({violations}) => done(violations.flatMap(({id, impact, nodes}) => nodes.map((node) =>
                `${id} (${impact}): ${node.target.join(" ")}: ${node.failureSummary}`))),
            (error) => done([`axe failed: ${error}`]));""")
    return result


def faint_texts(driver):
    """Colours of texts that contrast too little (AA: 4.5) with what is behind them: on the page, and on the bars of the timeline, which axe
    does not see."""
    css = lambda name: driver.execute_script("return getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim()", name)
    pairs = [(css(f"--{text}"), css(f"--{ground}")) for text in ("ink", "faint", "good", "bad") for ground in ("paper", "stripe")]
    state = driver.execute_script("const {timeline} = window.shardwrightStep ?? shardwright; return [timeline.state.text, timeline.state.colours.op]")
    return [(a, b) for a, b in [*pairs, *zip(*state)] if contrast(a, b) < 4.5]
