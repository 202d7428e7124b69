"""The dashboard client: wire format, mirror on disk, sender, logger."""
