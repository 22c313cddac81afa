from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trireme.errors import ConfigurationError
from trireme.launch.secret import SECRET_VARIABLE, find_secret, fresh_secret, user_secret

LONG = "0123456789abcdef"


def test_the_file_comes_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(LONG + "\n")
    environ = {SECRET_VARIABLE: "another secret of mine"}
    assert find_secret(file, environ, loopback=True) == (LONG.encode().hex(), f"file {file}")
    secret, origin = find_secret(None, environ, loopback=True)
    assert bytes.fromhex(secret) == b"another secret of mine"
    assert SECRET_VARIABLE in origin


def test_hosts_of_a_network_need_one_that_was_given(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    with pytest.raises(ConfigurationError, match="--secret-file"):
        find_secret(None, environ, loopback=False)
    assert list(tmp_path.iterdir()) == []


def test_on_one_host_the_user_has_one_of_their_own(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    secret, origin = find_secret(None, environ, loopback=True)
    file = tmp_path / "trireme" / "secret"
    assert origin == f"file {file}"
    assert file.stat().st_mode & 0o777 == 0o600
    assert find_secret(None, environ, loopback=True) == (secret, origin)
    assert [path.name for path in file.parent.iterdir()] == ["secret"]


def test_processes_that_make_it_at_once_agree(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trireme.launch.secret import user_secret; "
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
    with pytest.raises(ConfigurationError, match="chmod 600"):
        user_secret(file)


@pytest.mark.parametrize("text", ["", "short", "x" * 15])
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


def test_fresh_secrets_differ() -> None:
    assert fresh_secret() != fresh_secret()
    assert len(fresh_secret()) == 64
