"""Queries slurmctld through slurmrestd, for a collector without Slurm's commands, e.g. in a container.

slurmrestd serves the API versions of several releases, under /slurm/v0.0.N. It requires a JSON Web Token (`scontrol
token`), whose claim `sun` is the user. It does not report PrivateData, so the exporter assumes that PrivateData is set.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path

from gpu_exporter.agent.attribution.slurm.parse import NodeRecord, SlurmConfig
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.agent.slurm_collector.answers import ClusterJob, find_cluster, parse_cluster_jobs, parse_rest_nodes
from gpu_exporter.agent.slurm_collector.command_line import TIMEOUT_S
from gpu_exporter.common.address import Address
from gpu_exporter.common.fetch import FetchError, fetch_text
from gpu_exporter.common.files import read_named

VERSIONS = range(48, 37, -1)  # 0.0.38 is of Slurm 22.05, 0.0.45 of 26.05; the newest served version is used
NO_SUCH_PAGE = 404
MAX_TOKEN = 16 * 1024
HINT = "write a new token with `scontrol token username=slurm lifespan=SECONDS`"


class Rest:
    """Queries slurmctld through slurmrestd.

    `address`: address of slurmrestd. `token_file`: contains the output of `scontrol token`; read for each request.
    """

    def __init__(self, address: Address, token_file: Path, most_bytes: int) -> None:
        self._address = address
        self._token_file = token_file
        self._most_bytes = most_bytes
        self._version: int | None = None
        self._cluster = ""

    def read_nodes(self) -> dict[str, NodeRecord]:
        nodes, cluster = parse_rest_nodes(self._get("nodes"))
        self._cluster = cluster or self._cluster
        return nodes

    def read_jobs(self) -> list[ClusterJob]:
        text = self._get("jobs")
        self._cluster = self._cluster or find_cluster(text)
        return parse_cluster_jobs(text)

    def read_config(self) -> SlurmConfig:
        """Returns the configuration, as far as the last nodes and jobs show it."""
        return SlurmConfig(self._cluster, "", "", frozenset(("jobs", "users")))

    def _get(self, what: str) -> str:
        """Returns the text of one page. Raises SourceError."""
        headers = self._headers()
        versions = VERSIONS if self._version is None else (self._version,)
        for version in versions:
            page = self._address.page(f"/slurm/v0.0.{version}/{what}/")
            try:
                text = fetch_text(page, None, self._most_bytes, TIMEOUT_S, headers=headers)
            except FetchError as exc:
                if exc.status == NO_SUCH_PAGE:
                    continue
                hint = f"; is the token valid? {HINT}" if exc.status in (401, 403, 500, 511) else ""
                raise SourceError(f"slurmrestd: {exc}{hint}") from exc
            self._version = version
            return text
        self._version = None  # slurmrestd may be of another release at the next call
        known = f"v0.0.{VERSIONS[-1]} to v0.0.{VERSIONS[0]}"
        raise SourceError(f"slurmrestd: {self._address}: serves none of /slurm/{known}; is it slurmrestd?")

    def _headers(self) -> dict[str, str]:
        try:
            text = read_named(self._token_file, MAX_TOKEN).decode("ascii")
            token = text.strip().removeprefix("SLURM_JWT=")
            claims = token.split(".")[1]
            user = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["sun"]
        except OSError as exc:
            raise SourceError(f"{self._token_file}: {exc.strerror}; {HINT}") from exc
        except (ValueError, binascii.Error, LookupError, TypeError) as exc:
            raise SourceError(f"{self._token_file}: cannot parse the Slurm token; {HINT}") from exc
        if not token.isprintable() or not isinstance(user, str) or not user.isprintable():
            raise SourceError(f"{self._token_file}: cannot parse the Slurm token; {HINT}")
        return {"X-SLURM-USER-NAME": user, "X-SLURM-USER-TOKEN": token}
