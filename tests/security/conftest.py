"""Certificates and tokens made for one test run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvcache_service.rpc.callers import digest_of

NOW = datetime.now(UTC)


class Authority:
    """A certificate authority that writes PEM files into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = self._builder(self._name, self._key, NOW + timedelta(days=1)).add_extension(
            x509.BasicConstraints(True, None), True
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, uri: str = "", until: datetime = NOW + timedelta(hours=1)) -> tuple[Path, Path]:
        """Certificate and key for 127.0.0.1, with a URI among its names."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.IPAddress(ip_address("127.0.0.1"))]
        names += [x509.UniformResourceIdentifier(uri)] if uri else []
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = self._builder(subject, key, until).add_extension(x509.SubjectAlternativeName(names), False)
        certificate, private = self._folder / f"{name}.cert.pem", self._folder / f"{name}.key.pem"
        certificate.write_bytes(built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        pem, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        private.write_bytes(key.private_bytes(serialization.Encoding.PEM, pem, plain))
        return certificate, private

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - timedelta(days=2))
            .not_valid_after(until)
        )


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


def entry(secret: str, tenant: str, **rest: str) -> str:
    """One [[token]] as it stands in the file."""
    fields = {"name": f'"{tenant}-worker"', "tenant": f'"{tenant}"', "sha256": f'"{digest_of(secret)}"'} | rest
    return "\n".join(["[[token]]", *(f"{name} = {value}" for name, value in fields.items()), ""])
