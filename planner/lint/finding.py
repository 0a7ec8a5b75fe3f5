"""A finding about one variable, said the same way by every part of the lint."""

from __future__ import annotations

from probes.api import Finding, Severity


def finding(
    code: str, severity: Severity, name: str, value: str, message: str, remedy: str, evidence: tuple[str, ...] = ()
) -> Finding:
    """The variable is the subject, what it was set to the first evidence; the message begins a sentence."""
    return Finding(
        code=code,
        severity=severity,
        subject=name,
        message=message[:1].upper() + message[1:],
        evidence=(f"{name}={value}", *evidence),
        remedy=remedy,
    )
