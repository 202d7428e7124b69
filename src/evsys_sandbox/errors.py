"""What a sandbox refuses or fails at; every text is written for people."""

from __future__ import annotations


class SandboxError(Exception):
    """The sandbox itself failed: the command did not run, or a file cannot be had."""


class SandboxUnavailable(SandboxError):
    """This machine offers no sandbox. It should end the run: no other rollout would fare better."""


class DockerfileError(SandboxError):
    """A Dockerfile that the sandbox cannot read, or has a step that it cannot do."""
