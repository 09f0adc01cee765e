"""On whose behalf a request comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from jitney.apikeys import SCOPES, Scope
from jitney.errors import ScopeMissing
from jitney.records import JobStatus

CALLER: Final = "jitney.caller"
"""Where `admit` leaves it, in the ASGI scope."""


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request comes. key: the name of its API key, '' where none is asked for."""

    tenant: str = "-"
    scopes: tuple[Scope, ...] = SCOPES
    key: str = ""

    def may_see(self, job: JobStatus) -> bool:
        """Its own tenant's jobs; all of them where nobody is asked for a key."""
        return not self.key or job.tenant == self.tenant

    def check_scope(self, needed: Scope) -> None:
        """For what a route does besides its own purpose. Raises ScopeMissing."""
        if needed not in self.scopes:
            raise ScopeMissing(needed, held=list(self.scopes))


ANYBODY: Final = Caller()


def caller_of(request: Request) -> Caller:
    """Who asks. Where no key is asked for, anybody."""
    caller: Caller = request.scope.get(CALLER, ANYBODY)
    return caller
