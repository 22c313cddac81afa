"""What commands ask of a running job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trireme.certificates import Certificates
from trireme.launch.config.secret import read_private, read_secret
from trireme.launch.run_directory import JobRecord

if TYPE_CHECKING:
    from trireme.cluster.member import Observer
    from trireme.cluster.messages import ClusterStatus


def query(record: JobRecord, timeout: float = 5.0) -> ClusterStatus:
    """Asks the coordinator of a running job for the job's status."""
    return observer(record, timeout).query_status()


def observer(record: JobRecord, timeout: float = 5.0) -> Observer:
    """Returns an observer of a running job, which may ask its coordinator."""
    from trireme.cluster.member import Observer

    secret = bytes.fromhex(read_secret(Path(record.secret_file)))
    certificates = None
    if record.certificate_file:
        file = Path(record.certificate_file)
        certificates = Certificates(read_private(file, "the observer's key", "run the job again"))
    return Observer(record.coordinator, record.job, secret, certificates, timeout)
