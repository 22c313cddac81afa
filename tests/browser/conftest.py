"""A job that has recorded everything, a TensorBoard on it, and a browser.

Screenshots are left in `build/browser/`. Without Chromium, its driver or Selenium every test here
is skipped, and says what to install.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).parent / "programs" / "summaries.py"
PICTURES = ROOT / "build" / "browser"
INSTALL = "apt-get install chromium chromium-driver; pip install 'selenium>=4.20'"


@pytest.fixture(scope="session")
def driver() -> Iterator[object]:
    """Chromium without a window."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason=f"no Selenium: dashboards are not looked at ({INSTALL})"
    )
    from selenium.webdriver.chrome.service import Service

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    controller = shutil.which("chromedriver")
    if browser is None or controller is None:
        pytest.skip(f"no Chromium with its driver: dashboards are not looked at ({INSTALL})")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "--headless=new",
        "--window-size=1600,1000",
        "--disable-dev-shm-usage",
        # The projector draws with WebGL, also where there is no GPU.
        "--use-gl=angle",
        "--use-angle=swiftshader",
        "--enable-unsafe-swiftshader",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # Chromium's own has no use for root
    ):
        options.add_argument(argument)
    started = webdriver.Chrome(options=options, service=Service(controller))
    yield started
    started.quit()


@pytest.fixture(scope="session")
def run_dir(driver: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job of one server and two workers has left."""
    launch = ("--ps", "1", "--workers", "2", "--strategy", "sync")
    return train(tmp_path_factory.mktemp("job") / "run", *launch, program=PROGRAM)


def train(directory: Path, *launch: str, program: Path) -> Path:
    """Runs a job as a user would, and returns its run directory."""
    command = ("run", "--run-dir", directory, *launch, program)
    environ = {name: value for name, value in os.environ.items() if name != "TRIREME_TASK"}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "trireme", *command],
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return directory


@pytest.fixture(scope="session")
def tensorboard(run_dir: Path) -> Iterator[str]:
    """The address of a TensorBoard on that job."""
    with serve(run_dir) as address:
        yield address


@contextmanager
def serve(run_dir: Path) -> Iterator[str]:
    """Starts a TensorBoard on a job; yields its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--port", "0", "--reload_interval", "1"]
    with subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--logdir", str(run_dir / "tensorboard")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        said = []
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"TensorBoard \S+ at (http://\S+)", line):
                break
        else:
            raise AssertionError("TensorBoard did not start: " + "".join(said))
        yield found[1].rstrip("/") + "/"
        process.terminate()


@pytest.fixture(scope="session")
def page(driver: object, tensorboard: str) -> object:
    """The browser on that TensorBoard."""
    return page_of(driver, tensorboard)


def page_of(driver: object, address: str) -> object:
    """Returns the browser on a TensorBoard."""
    from tests.browser.page import Page

    PICTURES.mkdir(parents=True, exist_ok=True)
    return Page(driver, address, PICTURES)  # type: ignore[arg-type]
