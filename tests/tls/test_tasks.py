from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.environments.test_by_hand import FAR, LOCAL, mean
from trireme.errors import ConfigurationError
from trireme.tls.directory import issue, make_authority


def issued(directory: Path, *tasks: str) -> Path:
    make_authority(directory, 10)
    issue(directory, tasks, None)
    return directory


def test_a_task_finds_its_certificate_and_the_secret_beside_it(tmp_path: Path) -> None:
    certs = issued(tmp_path / "certs", "ps:0", "worker:1")
    server = mean(FAR, tmp_path, certs=str(certs))
    worker = mean(replace(FAR, role="worker", index=1), tmp_path, certs=str(certs))
    assert server.listen == worker.coordinator == "tls://node1:1"
    assert server.secret == worker.secret
    assert server.certificates != worker.certificates
    for task in (server, worker):
        assert "PRIVATE" not in repr(task.own_certificates)
        assert task.certificates.count("-----BEGIN CERTIFICATE-----") == 2
        assert "PRIVATE" not in repr(task)
        assert task.secret not in repr(task)
    file = str(certs / "worker-1.pem")
    assert mean(replace(FAR, role="worker", index=1), tmp_path, certs=file).secret == worker.secret


def test_certificates_in_the_run_directory_need_no_option(tmp_path: Path) -> None:
    issued(tmp_path / "run" / "certs", "ps:0")
    run = str(tmp_path / "run")
    assert mean(FAR, tmp_path, run_dir=run).listen == "tls://node1:1"
    with pytest.raises(ConfigurationError, match=r"worker:0 has no certificate at .*0\.pem"):
        mean(replace(FAR, role="worker"), tmp_path, run_dir=run)
    assert mean(LOCAL, tmp_path, run_dir=run).listen.startswith("tls://")  # asked for, so kept


def test_certificates_that_do_not_serve(tmp_path: Path) -> None:
    certs = issued(tmp_path / "certs", "ps:0", "worker:0")
    (certs / "worker-0.pem").rename(certs / "worker-1.pem")
    with pytest.raises(ConfigurationError, match=r"worker-1.pem is for worker:0, and not for"):
        mean(replace(FAR, role="worker", index=1), tmp_path, certs=str(certs))
    (certs / "ps-0.pem").chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"the key of ps:0 in .* can be read by other"):
        mean(FAR, tmp_path, certs=str(certs))
    with pytest.raises(ConfigurationError, match=r"ps:0 has no certificate at .*nowhere"):
        mean(FAR, tmp_path, certs=str(tmp_path / "nowhere"))
