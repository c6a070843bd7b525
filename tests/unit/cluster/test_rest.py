"""slurmrestd's answers, and valid and invalid tokens."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.memory_slurm import row_of_24_11

from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.agent.slurm_collector.answers import find_cluster, parse_rest_nodes
from gpu_exporter.agent.slurm_collector.rest import MAX_TOKEN, VERSIONS, Rest
from gpu_exporter.common.address import parse_address


def token_of(claims: Any) -> str:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJIUzI1NiJ9.{body}.c2lnbmF0dXJl"


def node(
    name: str = "n0", gres: str = "gpu:h100:4", used: str = "gpu:h100:1(IDX:2)", start: Any = 1000
) -> dict[str, Any]:
    return {"name": name, "gres": gres, "gres_used": used, "slurmd_start_time": start}


class Restd:
    """Serves one version of the API to clients with a token."""

    def __init__(self) -> None:
        self.version = 42
        self.answers: dict[str, Any] = {"nodes": {"meta": {}, "nodes": [node()]}, "jobs": {"jobs": []}}
        self.asked: list[str] = []
        self.headers: dict[str, str] = {}
        self.status = 200
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                outer.headers = {name.lower(): value for name, value in self.headers.items()}
                prefix = f"/slurm/v0.0.{outer.version}/"
                if not self.path.startswith(prefix):
                    self.send_error(404)
                    return
                if outer.status != 200:
                    self.send_error(outer.status)
                    return
                body = json.dumps(outer.answers[self.path.removeprefix(prefix).strip("/")]).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = parse_address(f"http://127.0.0.1:{self._server.server_address[1]}/")
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def restd() -> Iterator[Restd]:
    served = Restd()
    yield served
    served.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"SLURM_JWT={token_of({'sun': 'slurm', 'exp': 1})}\n", "utf-8")
    return file


def test_the_newest_served_api_version_is_found_once_and_again_after_an_upgrade(restd: Restd, token: Path) -> None:
    rest = Rest(restd.address, token, 10_000)
    assert set(rest.read_nodes()) == {"n0"}
    rest.read_jobs()
    tried = [f"/slurm/v0.0.{version}/nodes/" for version in range(VERSIONS[0], 41, -1)]
    assert restd.asked == [*tried, "/slurm/v0.0.42/jobs/"]
    restd.version = 45
    with pytest.raises(SourceError, match=r"serves none of /slurm/v0\.0\.38 to v0\.0\.48; is it slurmrestd\?"):
        rest.read_nodes()
    assert set(rest.read_nodes()) == {"n0"}


@pytest.mark.parametrize("prefix", ["SLURM_JWT=", "", "  "])
def test_the_user_of_a_request_is_the_user_of_the_token(restd: Restd, token: Path, prefix: str) -> None:
    written = token_of({"sun": "operator", "note": "?>" * 7})
    token.write_text(prefix + written)
    rest = Rest(restd.address, token, 10_000)
    rest.read_nodes()
    assert restd.headers["x-slurm-user-name"] == "operator"
    assert restd.headers["x-slurm-user-token"] == written
    token.write_text(token_of({"sun": "slurm"}))  # a new token
    rest.read_nodes()
    assert restd.headers["x-slurm-user-name"] == "slurm"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SLURM_JWT=",
        "a.b",
        "a.!!.c",
        "\xff",
        token_of({}),
        token_of({"sun": 7}),
        token_of({"sun": "a\r\nX-Other: b"}),
        token_of(["sun"]),
        token_of({"sun": "slurm"}) + "\n\nX-Other: b",
    ],
)
def test_a_text_that_is_not_a_token_is_never_sent(restd: Restd, token: Path, text: str) -> None:
    token.write_bytes(text.encode("latin-1"))
    with pytest.raises(
        SourceError, match=r"/token: cannot parse the Slurm token; write a new token with `scontrol token"
    ):
        Rest(restd.address, token, 10_000).read_nodes()
    assert restd.asked == []


def test_a_file_that_is_longer_than_any_token_is_not_sent(restd: Restd, token: Path) -> None:
    token.write_text(token_of({"sun": "slurm"}) + "x" * MAX_TOKEN)
    with pytest.raises(SourceError, match=f"/token: it is longer than {MAX_TOKEN} bytes; write a new token"):
        Rest(restd.address, token, 10_000).read_nodes()
    assert restd.asked == []


def test_a_missing_token_file_is_an_error(restd: Restd, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"/none: No such file or directory; write a new token"):
        Rest(restd.address, tmp_path / "none", 10_000).read_nodes()


@pytest.mark.parametrize(("status", "hint"), [(401, "is the token valid"), (500, "is the token valid"), (503, "$")])
def test_the_error_of_a_refusal_mentions_the_token_but_never_shows_it(
    restd: Restd, token: Path, status: int, hint: str
) -> None:
    restd.status = status
    with pytest.raises(SourceError, match=rf"^slurmrestd: http\S+/nodes/: HTTP status {status}.*{hint}") as caught:
        Rest(restd.address, token, 10_000).read_nodes()
    assert token_of({"sun": "slurm", "exp": 1}) not in str(caught.value)


def test_an_endless_answer_is_cut(restd: Restd, token: Path) -> None:
    restd.answers["nodes"]["nodes"] = [node(f"n{number}") for number in range(1000)]
    with pytest.raises(SourceError, match="the answer is longer than"):
        Rest(restd.address, token, 10_000).read_nodes()


def test_the_cluster_name_comes_from_the_answer_or_from_its_jobs(restd: Restd, token: Path) -> None:
    rest = Rest(restd.address, token, 100_000)
    rest.read_nodes()
    rest.read_jobs()
    assert rest.read_config().cluster == ""
    restd.answers["jobs"]["jobs"] = [row_of_24_11(name='","cluster":"mine","x":"', cluster="lab")]
    rest.read_jobs()
    assert rest.read_config().cluster == "lab"
    restd.answers["nodes"]["meta"] = {"slurm": {"cluster": "hpc"}}
    rest.read_nodes()
    rest.read_jobs()
    assert rest.read_config().cluster == "hpc"
    assert rest.read_config().private == {"jobs", "users"}  # slurmrestd does not report PrivateData


def test_nodes_of_both_json_formats_are_read() -> None:
    number = {"set": True, "infinite": False, "number": 1000}
    rows = [node(), node("n1", start=number), node("login", "", ""), node("down", used="?("), node("new", start=0)]
    nodes, cluster = parse_rest_nodes(json.dumps({"meta": {"Slurm": {}}, "nodes": rows}))
    assert set(nodes) == {"n0", "n1", "new"}
    assert nodes["n0"] == nodes["n1"]
    assert (nodes["n0"].configured, nodes["n0"].used.indexes) == ((("h100", 4),), (2,))
    assert (nodes["n0"].slurmd_start, nodes["new"].slurmd_start, cluster) == (1000.0, None, "")


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "{}",
        '{"meta": {}, "nodes": [{}]}',
        '{"meta": {}, "nodes": 7}',
        '{"meta": {"slurm": {"cluster": 7}}, "nodes": []}',
        '{"meta": [], "nodes": []}',
        "[" * 10_000,
    ],
)
def test_an_invalid_answer_for_nodes_is_refused(answer: str) -> None:
    with pytest.raises(SourceError, match="cannot parse slurmrestd's nodes"):
        parse_rest_nodes(answer)


def test_a_node_that_cannot_be_parsed_is_omitted_and_it_is_an_error_if_no_node_can_be_parsed() -> None:
    with pytest.raises(SourceError, match="node down: "):
        parse_rest_nodes(json.dumps({"meta": {}, "nodes": [node("down", used="?(")]}))


@given(st.text(), st.sampled_from(["name", "comment", "admin_comment"]))
def test_no_text_of_a_job_names_the_cluster(text: str, field: str) -> None:
    row = {field: f'{text}","cluster":"{text}mine"', "cluster": "lab", "state": "x"}
    assert find_cluster(json.dumps({"jobs": [row]})) == "lab"
    assert find_cluster(json.dumps({"jobs": [row]}, ensure_ascii=False)) == "lab"
