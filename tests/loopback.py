"""httpx for loopback: no TLS, no proxy settings of the environment.

``httpx.get`` and each new client read the certificates of all authorities first: 53 ms of CPU against 0.4 ms
without. Tests that ask again and again would take a core from the system they ask.
"""

from __future__ import annotations

import ssl
from functools import partial

import httpx

_NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

get = partial(httpx.get, verify=_NO_AUTHORITIES, trust_env=False)
post = partial(httpx.post, verify=_NO_AUTHORITIES, trust_env=False)
delete = partial(httpx.delete, verify=_NO_AUTHORITIES, trust_env=False)
stream = partial(httpx.stream, verify=_NO_AUTHORITIES, trust_env=False)
Client = partial(httpx.Client, verify=_NO_AUTHORITIES, trust_env=False)
AsyncClient = partial(httpx.AsyncClient, verify=_NO_AUTHORITIES, trust_env=False)
