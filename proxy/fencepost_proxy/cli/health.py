"""`fencepost health`: health check by exit status, for images without a shell or curl."""

from __future__ import annotations

import argparse
import ssl
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final

from fencepost_proxy.cli.status_client import add_address, url
from fencepost_proxy.cli.tables import printable

_SECONDS: Final = 4.0

_DESCRIPTION: Final = """\
Query the readiness endpoint (/readyz) of a running proxy and print its response.

exit code: 0 the proxy serves clients; 1 it does not, or it does not respond."""

_EXAMPLES: Final = """\
examples:
  fencepost health
      check the proxy on this machine that runs with --status 127.0.0.1:8080 or 0.0.0.0:8080

  fencepost health --live --status 127.0.0.1:9000
      check only that the process responds (/livez), also while it waits for Kafka
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "health",
        help="check that a proxy serves, for container health checks",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_address(parser)
    parser.add_argument("--live", action="store_true", help="query /livez instead of /readyz")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    path = "/livez" if args.live else "/readyz"
    host, port = args.status
    if str(args.status).startswith("https:"):
        # The certificate is for the clients' address, and the answer is no secret.
        unverified = ssl._create_unverified_context()
        connection: HTTPConnection = HTTPSConnection(host, port, timeout=_SECONDS, context=unverified)
    else:
        connection = HTTPConnection(host, port, timeout=_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        stated = answer.read(10_000).decode("utf-8", "replace").strip()
    except (OSError, HTTPException) as error:
        reason = printable(str(error).strip()) or "closed"
        print(f"fencepost health: no response from {url(args.status)}{path}: {reason}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    print("\n".join(printable(line) for line in stated.splitlines()))
    return 0 if answer.status == 200 else 1
