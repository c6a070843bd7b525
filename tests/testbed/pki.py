"""Certificates and kubeconfigs of a throw-away control plane: one CA, ECDSA keys, valid for a day, loopback only."""

from __future__ import annotations

import datetime
import ipaddress
import json
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
ADDRESSES = ("127.0.0.1", "10.96.0.1")


class Authority:
    """A CA that writes the certificates it signs to one folder."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test-ca")])
        certificate = self._build(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.certificate = directory / "ca.crt"
        self.certificate.write_bytes(self._sign(certificate))
        self.write_key("ca", self._key)

    def _build(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    def _sign(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def write_key(self, name: str, key: ec.EllipticCurvePrivateKey | None = None) -> Path:
        """Write NAME.key and NAME.pub of a new key, or of the given key."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        path = self.directory / f"{name}.key"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        path.chmod(0o600)
        path.with_suffix(".pub").write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
        return path

    def issue(self, name: str, user: str, group: str = "") -> tuple[Path, Path]:
        """Write NAME.crt and NAME.key for a user of a group; also valid for servers on loopback."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
        if group:
            attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        alternatives = [*map(x509.DNSName, NAMES), *(x509.IPAddress(ipaddress.ip_address(each)) for each in ADDRESSES)]
        builder = self._build(x509.Name(attributes), key.public_key()).add_extension(
            x509.SubjectAlternativeName(alternatives), critical=False
        )
        certificate = self.directory / f"{name}.crt"
        certificate.write_bytes(self._sign(builder))
        return certificate, self.write_key(name, key)

    def kubeconfig(self, name: str, server: str, user: str, group: str = "") -> Path:
        """Write a kubeconfig of a new user."""
        certificate, key = self.issue(name, user, group)
        path = self.directory / f"{name}.kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "test", "cluster": {"server": server, "certificate-authority-data": _data(self.certificate)}}
            ],
            "users": [
                {"name": name, "user": {"client-certificate-data": _data(certificate), "client-key-data": _data(key)}}
            ],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path.write_text(json.dumps(content))
        return path


def _data(path: Path) -> str:
    import base64

    return base64.b64encode(path.read_bytes()).decode()
