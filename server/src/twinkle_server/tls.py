"""HTTPS: the certificate of the service, read again on SIGHUP, and how commands on this machine recognize it."""

import hashlib
import ssl
from pathlib import Path

from twinkle.errors import ConfigError
from twinkle_server.settings import Settings


def context(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context of the service; None without a certificate.

    Raises:
        ConfigError: the certificate or its key is missing, cannot be read, or they do not belong together.
    """
    if settings.tls_cert is None:
        if settings.tls_key is not None:
            raise ConfigError(f"--tls-key {settings.tls_key} needs --tls-cert, the certificate that it belongs to")
        return None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    read(made, settings.tls_cert, settings.tls_key)
    return made


def read(made: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Read the certificate into a context; connections that are open keep the previous one.

    Raises:
        ConfigError: see `context`; the context is unchanged.
    """
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        for target in (trial, made):
            target.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        files = str(certificate) if key is None else f"{certificate} and {key}"
        raise ConfigError(
            f"cannot use the certificate {files}: {reason}; both must be PEM without a password"
        ) from error


def _no_password() -> str:
    raise ValueError("the private key is encrypted")


def fingerprint(certificate: Path | None) -> str:
    """Return the SHA-256 of the first certificate of a PEM file, by which `status` recognizes it; "" without one."""
    if certificate is None:
        return ""
    text = certificate.read_text("ascii", errors="replace")
    begin = text.index("-----BEGIN CERTIFICATE-----")
    end = text.index("-----END CERTIFICATE-----", begin) + len("-----END CERTIFICATE-----")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[begin:end])).hexdigest()
