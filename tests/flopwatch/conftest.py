"""The client's tests talk to the same server as those of the service."""

from tests.app.conftest import fresh_site, measured, obedient, obedient_later, reported, serve, site

__all__ = ["fresh_site", "measured", "obedient", "obedient_later", "reported", "serve", "site"]
