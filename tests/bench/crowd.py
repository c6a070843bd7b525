"""Fifty clients scrape at the same time: answered and lost scrapes, and how long they took.

python -m tests.bench.crowd [--clients 50] [--scrapes 40] [--instances 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port, wait_for

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n"


async def scrape(port: int, times: int, keeps: bool, took: list[float], lost: list[str]) -> None:
    """One client; a failed scrape is counted, and retried on a new connection."""
    reader: asyncio.StreamReader | None = None
    for _ in range(times):
        began = time.perf_counter()
        try:
            if reader is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
            writer.write(REQUEST)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
            if b" 200 " not in head.split(b"\r\n")[0]:
                lost.append(head.split(b"\r\n")[0].decode())
                continue
            took.append(1e3 * (time.perf_counter() - began))
            if not keeps or b"connection: close" in head:
                writer.close()
                reader = None
        except (OSError, asyncio.IncompleteReadError) as exc:
            lost.append(repr(exc))
            reader = None


async def crowd(port: int, clients: int, times: int, keeps: bool) -> str:
    took: list[float] = []
    lost: list[str] = []
    began = time.perf_counter()
    await asyncio.gather(*(scrape(port, times, keeps, took, lost) for _ in range(clients)))
    rate = len(took) / (time.perf_counter() - began)
    took.sort()
    return (
        f"{'kept alive' if keeps else 'one connection per scrape'}: {rate:.0f}/s, {len(lost)} of {clients * times} lost, "
        f"p50 {took[len(took) // 2]:.1f} ms, p99 {took[int(0.99 * len(took))]:.1f} ms"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--scrapes", type=int, default=40)
    parser.add_argument("--instances", type=int, default=0, help="MIG instances on each of eight GPUs")
    options = parser.parse_args()
    mig = {"mig": [{"profile": "1g.10gb"}] * options.instances} if options.instances else {}
    places = [(gpu, i) for gpu in range(8) for i in range(max(1, options.instances))]
    holders = [
        {"gpu": gpu, "kind": "pod", "name": f"ml/train-{gpu}-{i}/main", **({"mig": i} if mig else {})}
        for gpu, i in places
    ]
    with tempfile.TemporaryDirectory() as name, Processes(Path(name)) as processes:
        scenario = Path(name) / "scenario.yaml"
        scenario.write_text(json.dumps({"gpus": [{"model": "H100", **mig}] * 8, "holders": holders}), encoding="utf-8")
        port = free_port()
        flags = (f"--devices.scenario={scenario}", "--state.directory=", f"--web.listen-address=127.0.0.1:{port}")
        processes.start([*GPU_EXPORTER, *flags])
        wait_for(lambda: fetch(f"http://127.0.0.1:{port}/-/ready"), "the exporter")
        for keeps in (True, False):
            print(asyncio.run(crowd(port, options.clients, options.scrapes, keeps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
