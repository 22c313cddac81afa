"""The secret of a job whose tasks are started by hand: sources, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trireme.environments.secret import find_secret, read_given, user_secret
from trireme.errors import ConfigurationError
from trireme.launch.config.secret import SECRET_VARIABLE

LONG = "0123456789abcdef" * 2


def test_the_file_comes_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(LONG + "\n")
    file.chmod(0o600)
    environ = {SECRET_VARIABLE: "another secret of mine, long enough"}
    assert find_secret(file, environ, loopback=True) == LONG.encode().hex()
    secret = find_secret(None, environ, loopback=True)
    assert bytes.fromhex(secret) == b"another secret of mine, long enough"


def test_hosts_of_a_network_need_one_that_was_given(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    with pytest.raises(ConfigurationError, match="--secret-file"):
        find_secret(None, environ, loopback=False)
    assert list(tmp_path.iterdir()) == []


def test_on_one_host_the_user_has_one_of_their_own(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    secret = find_secret(None, environ, loopback=True)
    file = tmp_path / "trireme" / "secret"
    assert read_given(file) == secret
    assert file.stat().st_mode & 0o777 == 0o600
    assert find_secret(None, environ, loopback=True) == secret
    assert [path.name for path in file.parent.iterdir()] == ["secret"]


def test_processes_that_make_it_at_once_agree(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; "
        "from trireme.environments.secret import user_secret; "
        "print(user_secret(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "deep" / "secret")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    secrets = {process.communicate(timeout=60)[0] for process in processes}
    assert len(secrets) == 1
    assert len(secrets.pop()) > 64


def test_others_must_not_be_able_to_read_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    user_secret(file)
    file.chmod(0o640)
    with pytest.raises(ConfigurationError, match="can be read by other users"):
        user_secret(file)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644, 0o666])
def test_nor_one_that_was_given(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "job.secret"
    file.write_text(LONG)
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match="can be read by other users"):
        find_secret(file, {}, loopback=True)
    file.chmod(0o400)
    assert read_given(file) == LONG.encode().hex()


@pytest.mark.parametrize(
    "text",
    ["", "short", "x" * 15, "x" * 64, "0123456789abcdef", LONG[1:], "1234567890" * 3, "ab" * 40],
)
def test_what_can_be_guessed_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="guessed"):
        find_secret(None, {SECRET_VARIABLE: text}, loopback=True)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere"):
        find_secret(tmp_path / "nowhere", {}, loopback=True)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be made"):
        user_secret(tmp_path / "file" / "secret")


@pytest.mark.parametrize(
    "text", [LONG, LONG.upper(), "A7xK" * 3 + "pQz/t9+Lw2=", "12345678905" * 4]
)
def test_what_may_hold_128_bits_is_taken(text: str) -> None:
    find_secret(None, {SECRET_VARIABLE: text}, loopback=True)
