"""Finds the GPU of each IDX of one node in gres.conf.

IDX is a position in the node's list of GPUs, as slurmd builds it. Sources: gres.conf(5), and tests of slurmd 22.05.8,
24.11.5 and 26.05 with GPUs of several types and with fake_gpus.conf.

- AutoDetect off: the list has the `File=` entries. Types are in the order of the node's Gres in slurm.conf; GPUs of one
  type are in the order of the file. An IDX then means /dev/nvidiaN, and N is NVML's minor number.
- AutoDetect=nvml: the list has NVML's order, for any order of `File=`. The list has the GPUs in `File=`, or all GPUs
  without `File=`.
- AutoDetect=nvidia (since 24.11): slurmd learns no links between GPUs, so it sorts the `File=` entries by the names of
  their device files, with numbers as numbers, for any order of lines and types. Without `File=`, the list depends on
  the driver.

No other configuration proves an order. IDX is then not resolved, because a guess might give a job another job's GPU.

Grammar: keys and values are `Key=Value` or `Key="Value"`, keys in any case. `#` begins a comment, a backslash at the
end of a line continues the line, `Include FILE` reads another file. A line applies to the nodes of its NodeName,
otherwise to all nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from gpu_exporter.common.outside import need_whole
from gpu_exporter.common.slurm.hostlist import parse_names
from gpu_exporter.common.vendor import Vendor

MAX_INCLUDES = 16
_COMMENT = re.compile(r"(?<!\\)#.*")
_PAIR = re.compile(r"\s*([A-Za-z0-9_.]+)\s*=\s*(?:\"([^\"]*)\"|(\S+))(?=\s|$)")
_INCLUDE = re.compile(r"\s*include\s+(\S+)\s*", re.IGNORECASE)
OFF = ("", "off")
SHARED = ("shard", "mps")  # gres of which jobs get parts of GPUs
MinorOf: TypeAlias = Callable[[str], "int | None"]
Shares: TypeAlias = Mapping[int, frozenset[str]]
"""The kinds of parts (shard, mps) that jobs can get of the GPU at each IDX. A GPU that jobs cannot share is missing."""
# The keys of slurmd's parser, with its aliases.
KEYS = frozenset(
    ("autodetect", "name", "nodename", "type", "count", "file", "files", "multiplefiles", "flags", "cores", "cpus")
) | {"links", "link", "ignore"}


class GresConfError(ValueError):
    """The file cannot be parsed. The text contains the file, the line and the error."""


class GresLine(NamedTuple):
    """One line about this node's GPUs, or about AutoDetect. `place`: FILE:LINE."""

    place: str
    options: dict[str, str]


class GpuOrder(NamedTuple):
    """The meaning of a node's IDX numbers. There are three kinds:

    - "minor": `minors` has the minor number of each IDX as text, "" for a part of a GPU. `caps` then has the numbers of
      the part's capability files (`/dev/nvidia-caps/nvidia-capN`).
    - "index": an IDX is a position in NVML's order of the GPUs in `minors`, or of all GPUs if `minors` is empty. Valid
      only if NVML lists `total` of them.
    - "unknown": `problem` contains the reason and the remedy.
    """

    kind: Literal["minor", "index", "unknown"]
    minors: tuple[str, ...] = ()
    total: int = 0
    problem: str = ""
    caps: tuple[tuple[int, ...], ...] = ()


class _ConfEntry(NamedTuple):
    """One GPU in the file. `place`: FILE:LINE.

    `minor`: "" for a part of a GPU. `caps` then has the numbers of its capability files.
    """

    kind: str
    minor: str
    place: str
    caps: tuple[int, ...] = ()


def parse_gres_conf(text: str, name: str, read_file: Callable[[str], str] | None = None) -> list[GresLine]:
    """Returns the lines of a gres.conf and of the files that it includes. `name`: its path, for messages.

    `read_file(path)` returns the text of an included file, or raises OSError. Raises GresConfError.
    """
    return list(_parse(text, name, read_file, MAX_INCLUDES))


def _parse(text: str, name: str, read_file: Callable[[str], str] | None, depth: int) -> Iterator[GresLine]:
    for number, line in _join_lines(text):
        place = f"{name}:{number}"
        include = _INCLUDE.fullmatch(line)
        if include:
            if read_file is None or not depth:
                raise GresConfError(f"{place}: this Include is ignored: Includes are nested too deeply")
            try:
                included = read_file(include[1])
            except (OSError, UnicodeDecodeError) as exc:
                raise GresConfError(f"{place}: Include {include[1]}: {exc}") from exc
            yield from _parse(included, include[1], read_file, depth - 1)
            continue
        options = _parse_pairs(line, place)
        if options:
            yield GresLine(place, options)


def _join_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields lines without comments, each with the number of its first line. Joins continued lines."""
    parts: list[str] = []
    first = 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = _COMMENT.sub("", raw).rstrip()
        first = first if parts else number
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        yield first, " ".join((*parts, line))
        parts = []
    if parts:
        yield first, " ".join(parts)


def _parse_pairs(line: str, place: str) -> dict[str, str]:
    options: dict[str, str] = {}
    position = 0
    while line[position:].strip():
        match = _PAIR.match(line, position)
        if not match:
            raise GresConfError(f"{place}: {line[position:].strip()[:60]!r} is not Key=Value")
        key = match[1].lower()
        if key in options:
            raise GresConfError(f"{place}: {match[1]} is given twice")
        options[key] = match[2] if match[2] is not None else match[3]
        position = match.end()
    return options


def _nobody(path: str) -> int | None:
    del path
    return None


def order_of(
    lines: Iterable[GresLine],
    node: str,
    configured: Sequence[tuple[str, int]],
    vendor: Vendor,
    minor_of: MinorOf = _nobody,
) -> GpuOrder:
    """Returns the order of the GPUs of `node`. `configured`: (type, count) in the order of the node's record.

    `minor_of`: returns the minor number of a device file, also for links and for names that the site chose. Raises
    GresConfError for a list or count that cannot be parsed.
    """
    mine = [line for line in lines if _is_about(line, node)]
    detect = _autodetect(mine)
    entries: list[_ConfEntry] = []
    fileless = ""
    for line in mine:
        if line.options.get("name", "gpu").lower() == "gpu" and (unknown := sorted(line.options.keys() - KEYS)):
            raise GresConfError(f"{line.place}: unknown key {unknown[0][:40]!r}")
        if line.options.get("name", "").lower() == "gpu":
            found = _files(line, vendor, minor_of)
            fileless = fileless or ("" if found else line.place)
            kind = line.options.get("type", "").lower()
            entries += [_ConfEntry(kind, minor, line.place, caps) for minor, caps in found]
    if detect in vendor.autodetect:
        return _nvml_order(entries, fileless, configured)
    if detect not in (*OFF, *vendor.autodetect_files):
        return _unknown(
            f"with AutoDetect={detect}, the driver cannot confirm the order of the GPUs; set AutoDetect=off, and add "
            f"Name=gpu File={vendor.device_file_name}"
        )
    if fileless:
        return _unknown(f"{fileless}: Name=gpu without File= names no device; add File={vendor.device_file_name}")
    if not entries:
        return _unknown(f"no line names a GPU of node {node}; add Name=gpu File={vendor.device_file_name}")
    return _file_order(entries, configured) if detect in OFF else _name_order(entries, mine, configured)


def count_files(lines: Iterable[GresLine], node: str, vendor: Vendor) -> int:
    """Returns how many GPUs and parts of GPUs this node has by the lines with NodeName= and File=. Ignores lines
    without NodeName=, because a node without GPUs may have the same file. Raises GresConfError.
    """
    named = (line for line in lines if line.options.get("name", "").lower() == "gpu" and "nodename" in line.options)
    return sum(len(_files(line, vendor, _nobody)) for line in named if _is_about(line, node))


def find_shares(
    lines: Iterable[GresLine], node: str, order: GpuOrder, vendor: Vendor, minor_of: MinorOf = _nobody
) -> Shares:
    """Returns which GPUs of `node` jobs can share. Raises GresConfError.

    A line without File= means all GPUs of the node. So does each line if `order` does not name the minor numbers.
    """
    shares: dict[int, frozenset[str]] = {}
    for line in lines:
        kind = line.options.get("name", "").lower()
        if kind not in SHARED or not _is_about(line, node):
            continue
        try:
            minors = {minor for minor, _ in _files(_without_count(line), vendor, minor_of)}
        except GresConfError:  # the order of the GPUs remains valid
            minors = set()
        is_named = order.kind == "minor" and minors and minors <= {*order.minors} - {""}
        for index in range(max(len(order.minors), order.total)):
            if not is_named or order.minors[index] in minors:
                shares[index] = shares.get(index, frozenset()) | {kind}
    return shares


def _without_count(line: GresLine) -> GresLine:
    """Returns the line without Count=, which is the number of parts, not of files."""
    return line._replace(options={key: value for key, value in line.options.items() if key != "count"})


def _unknown(problem: str) -> GpuOrder:
    return GpuOrder("unknown", problem=problem)


def _file_order(entries: Sequence[_ConfEntry], configured: Sequence[tuple[str, int]]) -> GpuOrder:
    """Returns the order that slurmd makes of the `File=` entries, with types in the order of slurm.conf.

    The kind is "unknown" if gres.conf and slurm.conf have different numbers of GPUs, because slurmd then drops GPUs.
    """
    ordered: list[_ConfEntry] = []
    for kind, count in configured:
        of_kind = [entry for entry in entries if entry.kind == kind]
        if len(configured) == 1 and not kind and len({entry.kind for entry in entries}) == 1:
            of_kind = list(entries)  # one type in the file, which slurm.conf does not name
        if len(of_kind) != count:
            named = f"gpu:{kind}:{count}" if kind else f"gpu:{count}"
            return _unknown(
                f"{entries[0].place}: names {len(of_kind)} GPUs, but slurm.conf gives the node Gres={named}"
            )
        ordered += of_kind
    if len(ordered) != len(entries):
        spare = next(entry for entry in entries if entry not in ordered)
        return _unknown(f"{spare.place}: this GPU is not in the node's Gres in slurm.conf")
    caps = tuple(entry.caps for entry in ordered)
    return GpuOrder("minor", tuple(entry.minor for entry in ordered), caps=caps if any(caps) else ())


def _name_order(
    entries: Sequence[_ConfEntry], lines: Iterable[GresLine], configured: Sequence[tuple[str, int]]
) -> GpuOrder:
    """Returns the order of the entries by the names of their device files, for GPUs that slurmd has detected itself."""
    parts = [entry.place for entry in entries if not entry.minor]
    if parts:
        return _unknown(f"{parts[0]}: MIG devices are not resolved by their position")
    count = sum(number for _, number in configured)
    if len(entries) != count:
        return _unknown(f"{entries[0].place}: names {len(entries)} GPUs, but slurm.conf gives the node {count}")
    names = [name for line in lines if line.options.get("name", "").lower() == "gpu" for name in _names(line)]
    ordered = sorted(zip(map(_natural, names), entries, strict=True))
    return GpuOrder("minor", tuple(entry.minor for _, entry in ordered))


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts /dev/nvidia2 before /dev/nvidia10. Numbers are at the odd places."""
    parts = re.split(r"([0-9]+)", name)
    return [(len(part), part) if place % 2 else (0, part) for place, part in enumerate(parts)]


def _nvml_order(entries: Sequence[_ConfEntry], fileless: str, configured: Sequence[tuple[str, int]]) -> GpuOrder:
    if entries and fileless:
        return _unknown(
            f"{fileless}: with AutoDetect=nvml, give all lines File=, or none; otherwise the order of the GPUs is "
            "unknown"
        )
    count = sum(number for _, number in configured)
    parts = [entry.place for entry in entries if not entry.minor]
    if parts:
        return _unknown(f"{parts[0]}: MIG devices are not resolved by their position")
    if entries and len(entries) != count:
        return _unknown(f"{entries[0].place}: names {len(entries)} GPUs, but slurm.conf gives the node {count}")
    return GpuOrder("index", tuple(entry.minor for entry in entries), count)


def _is_about(line: GresLine, node: str) -> bool:
    names = line.options.get("nodename")
    if names is None:
        return True
    try:
        return node in parse_names(names)
    except ValueError as exc:
        raise GresConfError(f"{line.place}: NodeName: {exc}") from exc


def _autodetect(lines: list[GresLine]) -> str:
    """Returns the AutoDetect value of this node. A line with NodeName or Name overrides a line with only AutoDetect."""
    general = own = ""
    for line in lines:
        value = line.options.get("autodetect", "").lower()
        if value and ("nodename" in line.options or "name" in line.options):
            if own and own != value:
                raise GresConfError(f"{line.place}: AutoDetect={value} contradicts AutoDetect={own} for the same node")
            own = value
        elif value:
            general = value
    return own or general


def _files(line: GresLine, vendor: Vendor, minor_of: MinorOf) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the line's GPUs as (minor number, capability files). The minor number is "" for a part of a GPU."""
    files = _names(line)
    if "multiplefiles" in line.options:
        if files:
            raise GresConfError(f"{line.place}: File and MultipleFiles cannot be combined")
        return [("", _caps(line, vendor))]  # a MIG device: several files are one entry (gres.conf(5), MultipleFiles)
    count = line.options.get("count", "")
    if files and count and count != str(len(files)):
        raise GresConfError(f"{line.place}: Count={count[:20]}, but File= names {len(files)} devices")
    minors: list[str] = []
    for file in files:
        minor = minor_of(file)
        match = vendor.device_file.fullmatch(file)
        if minor is None and match is None:
            raise GresConfError(f"{line.place}: {file[:80]!r} is not a device {vendor.device_file_name}")
        minors.append(str(minor) if minor is not None or match is None else str(need_whole(match[1])))
    return [(minor, ()) for minor in minors]


def _names(line: GresLine) -> list[str]:
    """Returns the device files of a line."""
    try:
        return parse_names(line.options.get("file", line.options.get("files", "")))
    except ValueError as exc:
        raise GresConfError(f"{line.place}: File: {exc}") from exc


def _caps(line: GresLine, vendor: Vendor) -> tuple[int, ...]:
    """Returns the numbers of a MIG device's capability files. Ignores other files."""
    try:
        files = parse_names(line.options["multiplefiles"])
    except ValueError as exc:
        raise GresConfError(f"{line.place}: MultipleFiles: {exc}") from exc
    return tuple(need_whole(match[1]) for file in files if (match := vendor.capability_file.fullmatch(file)))
