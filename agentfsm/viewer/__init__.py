"""The viewer: stored runs in a browser, live, and the inbox in which people answer them.

::

    app = agentfsm.viewer.app(open_store("sqlite:///runs.db"))  # an ASGI app: uvicorn.run(app), or mount it in yours

It needs the extra ``view`` (Starlette and uvicorn). ``application`` puts it together, ``access`` decides who may see
and do what, and each page is one module of ``pages`` and one of ``static``.
"""

from __future__ import annotations

from agentfsm.errors import MissingExtraError

try:
    import starlette as _starlette
except ModuleNotFoundError as error:
    raise MissingExtraError("the viewer", "view") from error

from agentfsm.viewer.access import EVERY_TENANT, ByTenant
from agentfsm.viewer.application import app
from agentfsm.viewer.passes import one_time_link

__all__ = ["EVERY_TENANT", "ByTenant", "app", "one_time_link"]

del _starlette
