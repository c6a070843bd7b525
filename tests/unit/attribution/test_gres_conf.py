"""gres.conf: where it is, what an IDX means, and when no order is proven. Orders as slurmd 22.05 and 24.11 made them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.attribution.slurm.gres.conf import (
    MAX_INCLUDES,
    GpuOrder,
    GresConfError,
    order_of,
    parse_gres_conf,
)
from gpu_exporter.agent.attribution.slurm.gres.epochs import GresContent
from gpu_exporter.agent.attribution.slurm.gres.files import (
    MAX_CONF,
    REMEDY,
    ConfPlace,
    count_named,
    list_places,
    read_order,
)
from gpu_exporter.agent.attribution.slurm.parse import NodeRecord, SlurmConfig
from gpu_exporter.common.slurm.gres import Gres
from gpu_exporter.common.vendor import NVIDIA

H100 = (("h100", 4),)


def order(text: str, configured: tuple[tuple[str, int], ...] = H100, node: str = "n0") -> GpuOrder:
    return order_of(parse_gres_conf(text, "gres.conf"), node, configured, vendor=NVIDIA)


@pytest.mark.parametrize(
    ("text", "configured", "minors"),
    [
        ("Name=gpu Type=h100 File=/dev/nvidia[0-3]", H100, "0 1 2 3"),
        ("Name=gpu Type=h100 File=/dev/nvidia[2-3]\nName=gpu Type=h100 File=/dev/nvidia[0-1]", H100, "2 3 0 1"),
        ("Name=gpu File=/dev/nvidia[2-3]\nName=gpu File=/dev/nvidia[0-1]", (("", 4),), "2 3 0 1"),
        ("Name=gpu Type=h100 File=/dev/nvidia[0-1]", (("", 2),), "0 1"),
        # Types come in the order of slurm.conf, not of gres.conf (seen on both releases).
        (
            "Name=gpu Type=h100 File=/dev/nvidia[0-1]\nName=gpu Type=a100 File=/dev/nvidia[2-3]",
            (("a100", 2), ("h100", 2)),
            "2 3 0 1",
        ),
        ('AutoDetect=off\nname=GPU type=H100 file="/dev/nvidia0,/dev/nvidia1" Count=2', (("h100", 2),), "0 1"),
        ("Name=gpu Type=h100 \\\n  File=/dev/nvidia[0-3] # all\n", H100, "0 1 2 3"),
        ("Name = gpu Type = h100 File = /dev/nvidia[0-3]", H100, "0 1 2 3"),
        (
            "NodeName=r[1-2]n[1-4] Name=gpu File=/dev/nvidia9\nNodeName=n[0-9] Name=gpu File=/dev/nvidia3",
            (("", 1),),
            "3",
        ),
        ("AutoDetect=nvml\nNodeName=n0 AutoDetect=off Name=gpu Type=h100 File=/dev/nvidia[0-3]", H100, "0 1 2 3"),
        ("Name=gpu File=/dev/nvidia0\nName=mps Count=100\nName=shard Count=8 File=/dev/nvidia0", (("", 1),), "0"),
    ],
)
def test_file_entries_give_the_order_of_gpus_by_type_and_line(
    text: str, configured: tuple[tuple[str, int], ...], minors: str
) -> None:
    assert order(text, configured) == GpuOrder("minor", tuple(minors.split()))


@pytest.mark.parametrize(
    ("text", "minors"),
    [
        ("AutoDetect=nvml", ()),
        ("AutoDetect=nvml\nName=gpu Type=h100 File=/dev/nvidia[3,1,0,2]", ("3", "1", "0", "2")),
        ("AutoDetect=off\nNodeName=n0 AutoDetect=nvml", ()),
        ("Name=gpu Type=h100 AutoDetect=nvml File=/dev/nvidia[0-3]", ("0", "1", "2", "3")),
        ("AutoDetect=NVML\nName=gpu Type=h100", ()),
    ],
)
def test_with_autodetect_the_order_is_that_of_nvml_for_any_order_of_files(text: str, minors: tuple[str, ...]) -> None:
    assert order(text) == GpuOrder("index", minors, 4)


@pytest.mark.parametrize(
    ("text", "configured", "minors"),
    [
        (
            "AutoDetect=nvidia\nName=gpu Type=h100 File=/dev/nvidia[3,1]\nName=gpu File=/dev/nvidia[2,0]",
            H100,
            "0 1 2 3",
        ),
        ("Name=gpu AutoDetect=NVIDIA File=/dev/nvidia[10-11,2-3]", H100, "2 3 10 11"),
        (
            "AutoDetect=nvidia\nName=gpu Type=b File=/dev/nvidia[1,3]\nName=gpu Type=a File=/dev/nvidia[0,2]",
            (("a", 2), ("b", 2)),
            "0 1 2 3",
        ),
    ],
)
def test_with_autodetect_of_nvidia_the_order_is_that_of_the_device_files(
    text: str, configured: tuple[tuple[str, int], ...], minors: str
) -> None:
    assert order(text, configured) == GpuOrder("minor", tuple(minors.split()))


@pytest.mark.parametrize(
    ("text", "configured", "problem"),
    [
        ("", H100, "no line names a GPU of node n0; add Name=gpu File=/dev/nvidiaN"),
        (
            "Name=gpu Type=h100 Count=4",
            H100,
            "gres.conf:1: Name=gpu without File= names no device; add File=/dev/nvidiaN",
        ),
        *(
            (
                f"AutoDetect={detect}",
                H100,
                f"with AutoDetect={detect}, the driver cannot confirm the order of the GPUs; set AutoDetect=off, and add "
                "Name=gpu File=/dev/nvidiaN",
            )
            for detect in ("rsmi", "full")
        ),
        ("AutoDetect=nvidia", H100, "no line names a GPU of node n0; add Name=gpu File=/dev/nvidiaN"),
        (
            "AutoDetect=nvidia\nName=gpu Type=h100 Count=4",
            H100,
            "gres.conf:2: Name=gpu without File= names no device; add File=/dev/nvidiaN",
        ),
        (
            "AutoDetect=nvidia\nName=gpu Type=h100 File=/dev/nvidia[0-2]",
            H100,
            "gres.conf:2: names 3 GPUs, but slurm.conf gives the node 4",
        ),
        (
            "AutoDetect=nvidia\nName=gpu MultipleFiles=/dev/nvidia4,/dev/nvidia-caps/nvidia-cap30",
            (("", 1),),
            "gres.conf:2: MIG devices are not resolved by their position",
        ),
        (
            "Name=gpu Type=h100 File=/dev/nvidia[0-2]",
            H100,
            "gres.conf:1: names 3 GPUs, but slurm.conf gives the node Gres=gpu:h100:4",
        ),
        (
            "Name=gpu Type=h100 File=/dev/nvidia[0-3]\nName=gpu Type=a100 File=/dev/nvidia4",
            H100,
            "gres.conf:2: this GPU is not in the node's Gres in slurm.conf",
        ),
        (
            "AutoDetect=nvml\nName=gpu Type=h100 File=/dev/nvidia[0-2]",
            H100,
            "gres.conf:2: names 3 GPUs, but slurm.conf gives the node 4",
        ),
        (
            "AutoDetect=nvml\nName=gpu File=/dev/nvidia0\nName=gpu Type=h100",
            H100,
            "gres.conf:3: with AutoDetect=nvml, give all lines File=, or none; otherwise the order of the GPUs is "
            "unknown",
        ),
        (
            "AutoDetect=nvml\nName=gpu MultipleFiles=/dev/nvidia4,/dev/nvidia-caps/nvidia-cap30",
            H100,
            "gres.conf:2: MIG devices are not resolved by their position",
        ),
    ],
)
def test_a_configuration_that_proves_no_order_is_unknown_with_line_and_remedy(
    text: str, configured: tuple[tuple[str, int], ...], problem: str
) -> None:
    assert order(text, configured) == GpuOrder("unknown", problem=problem)


def test_a_mig_device_of_several_files_is_one_position_and_not_a_whole_gpu() -> None:
    text = "Name=gpu File=/dev/nvidia0\nName=gpu MultipleFiles=/dev/nvidia4,/dev/nvidia-caps/nvidia-cap30"
    found = order(text, (("", 2),))
    assert (found.minors, found.caps) == (("0", ""), ((), (30,)))


def test_capability_files_are_read_from_a_list_and_files_of_other_kinds_are_ignored() -> None:
    text = "Name=gpu MultipleFiles=/dev/nvidia4,/dev/nvidia-caps/nvidia-cap[30-31],/dev/nvidiactl"
    assert order(text, (("", 1),)).caps == ((30, 31),)
    with pytest.raises(GresConfError, match=r"MultipleFiles: .*brackets do not match"):
        order("Name=gpu MultipleFiles=/dev/nvidia[4", (("", 1),))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Name=gpu File", "gres.conf:1: 'File' is not Key=Value"),
        ("Nmae=gpu", "gres.conf:1: unknown key 'nmae'"),
        ("Name=gpu Name=gpu", "gres.conf:1: Name is given twice"),
        ("Name=gpu File=/dev/nvidia[0", "gres.conf:1: File: '/dev/nvidia[0': brackets do not match"),
        ("Name=gpu File=/dev/dri/card0", "gres.conf:1: '/dev/dri/card0' is not a device /dev/nvidiaN"),
        ("Name=gpu Count=3 File=/dev/nvidia[0-1]", "gres.conf:1: Count=3, but File= names 2 devices"),
        ("\nNodeName=n[1 Name=gpu", "gres.conf:2: NodeName: 'n[1': brackets do not match"),
        (
            "NodeName=n0 AutoDetect=off\nNodeName=n0 AutoDetect=nvml",
            "gres.conf:2: AutoDetect=nvml contradicts AutoDetect=off for the same node",
        ),
        ("Include other.conf", "gres.conf:1: this Include is ignored: Includes are nested too deeply"),
    ],
)
def test_a_line_that_is_not_understood_is_refused_with_its_number(text: str, error: str) -> None:
    with pytest.raises(GresConfError) as caught:
        order(text)
    assert str(caught.value) == error


def test_included_lines_count_at_the_place_of_the_include() -> None:
    files = {"more.conf": "Name=gpu File=/dev/nvidia2\n", "loop.conf": "Include loop.conf\n"}
    lines = parse_gres_conf(
        "Name=gpu File=/dev/nvidia1\nInclude more.conf\nName=gpu File=/dev/nvidia0", "g", files.__getitem__
    )
    assert order_of(lines, "n0", (("", 3),), vendor=NVIDIA).minors == ("1", "2", "0")
    with pytest.raises(GresConfError, match=r"loop\.conf:1: this Include is ignored: Includes are nested too deeply"):
        parse_gres_conf("Include loop.conf", "g", files.__getitem__)

    def missing(path: str) -> str:
        raise FileNotFoundError(2, "No such file or directory", path)

    with pytest.raises(GresConfError, match=r"g:1: Include gone\.conf: .*No such file"):
        parse_gres_conf("Include gone.conf", "g", missing)


WORDS = st.sampled_from(
    ["Name=gpu", "Name=mps", "NodeName=n0", "NodeName=n[0-3]", "NodeName=n[1", "File=/dev/nvidia[0-3]", "File=/dev/nvidia0",
     'File="/dev/nvidia1,/dev/nvidia2"', "Type=h100", "Type=a100", "Count=4", "AutoDetect=nvml", "AutoDetect=off", "\\\n",
     "\n", "#", "MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap1", "=", '"', "Cores=0-7", "Include x"]
)  # fmt: skip


@given(st.lists(WORDS, max_size=24).map(" ".join), st.sampled_from([H100, (("", 2),), (("a100", 1), ("h100", 4)), ()]))
def test_any_file_gives_an_order_of_full_length_or_a_reason(text: str, configured: tuple[tuple[str, int], ...]) -> None:
    try:
        found = order(text, configured)
    except GresConfError as exc:
        assert str(exc).startswith("gres.conf:")
        return
    total = sum(count for _, count in configured)
    if found.kind == "minor":
        assert len(found.minors) == total
    elif found.kind == "index":
        assert found.total == total
        assert len(found.minors) in (0, total)
    else:
        assert found.problem


def test_included_files_may_include_others_and_errors_name_the_inner_line() -> None:
    files = {
        "a.conf": "Include b.conf\n",
        "b.conf": "\n# a comment\nName=gpu \\\n  File=/dev/nvidia1\nName=gpu Fiel=x\n",
    }
    with pytest.raises(GresConfError) as caught:
        order_of(parse_gres_conf("Include a.conf", "g", files.__getitem__), "n0", (("", 1),), vendor=NVIDIA)
    assert str(caught.value) == "b.conf:5: unknown key 'fiel'"
    files["b.conf"] = files["b.conf"].rpartition("Name")[0]
    assert [line.place for line in parse_gres_conf("Include a.conf", "g", files.__getitem__)] == ["b.conf:3"]


def test_a_chain_of_includes_is_followed_up_to_a_limit() -> None:
    files = {f"{number}.conf": f"Include {number + 1}.conf\n" for number in range(MAX_INCLUDES)}
    files[f"{MAX_INCLUDES}.conf"] = "Name=gpu File=/dev/nvidia0\n"
    assert len(parse_gres_conf("Include 1.conf", "g", files.__getitem__)) == 1
    with pytest.raises(
        GresConfError,
        match=rf"{MAX_INCLUDES - 1}\.conf:1: this Include is ignored: Includes are nested too deeply",
    ):
        parse_gres_conf("Include 0.conf", "g", files.__getitem__)


def test_a_continued_last_line_counts() -> None:
    assert order("Name=gpu File=/dev/nvidia0 \\\nCount=1 \\", (("", 1),)).minors == ("0",)
    assert order("Name=gpu # File=/dev/nvidia7\\\nName=gpu File=/dev/nvidia0", (("", 1),)).kind == "unknown"


@pytest.mark.parametrize(
    ("text", "configured", "problem"),
    [
        (
            "Name=gpu Type=h100 File=/dev/nvidia[0-1]",
            (("a100", 2),),
            "gres.conf:1: names 0 GPUs, but slurm.conf gives the node Gres=gpu:a100:2",
        ),
        (
            "Name=gpu Type=h100 File=/dev/nvidia0\nName=gpu Type=a100 File=/dev/nvidia1",
            (("", 2),),
            "gres.conf:1: names 0 GPUs, but slurm.conf gives the node Gres=gpu:2",
        ),
        (
            "Name=gpu Type=h100 File=/dev/nvidia[0-1]",
            (("", 1), ("h100", 1)),
            "gres.conf:1: names 0 GPUs, but slurm.conf gives the node Gres=gpu:1",
        ),
    ],
)
def test_gpus_of_types_that_slurm_conf_does_not_count_prove_no_order(
    text: str, configured: tuple[tuple[str, int], ...], problem: str
) -> None:
    assert order(text, configured) == GpuOrder("unknown", problem=problem)


def test_autodetect_on_a_line_of_gpus_overrides_the_general_line() -> None:
    text = "AutoDetect=off\nName=gpu AutoDetect=nvml File=/dev/nvidia[0-3]"
    assert order(text).kind == "index"
    with pytest.raises(GresConfError, match=r"gres\.conf:1: File and MultipleFiles cannot be combined"):
        order("Name=gpu File=/dev/nvidia0 MultipleFiles=/dev/nvidia1")


def test_an_error_in_a_line_about_other_nodes_or_resources_does_not_affect_this_node() -> None:
    text = "NodeName=n9 Name=gpu Fiel=x\nName=nic Speed=fast File=/dev/nic0\nName=gpu Files=/dev/nvidia0 Link=0"
    assert order(text, (("", 1),)).minors == ("0",)


@pytest.mark.parametrize(
    ("environment", "path", "spool", "named", "places"),
    [
        (
            "/site/slurm.conf",
            "/opt/slurm/slurm.conf",
            "/var/spool/%h/%n",
            None,
            ["/site", "/opt/slurm", "/run/slurm/conf*", "/var/spool/host7/n0/conf-cache*", "/etc/slurm"],
        ),
        ("", "/etc/slurm/slurm.conf", "", None, ["/etc/slurm", "/run/slurm/conf*"]),
        (None, "", "/var/spool", None, ["/run/slurm/conf*", "/var/spool/conf-cache*", "/etc/slurm"]),
        ("/site/slurm.conf", "/opt/slurm/slurm.conf", "/var/spool", "/here/gpus.conf", ["/here"]),
        (None, "", "/var/spool", "/var/spool/conf-cache/gpus.conf", ["/var/spool/conf-cache*"]),
    ],
    ids=["everywhere", "no-spool", "no-slurm-conf", "named", "named-copy"],
)
def test_gres_conf_is_found_beside_slurm_conf_in_slurmds_copy_or_in_etc(
    monkeypatch: pytest.MonkeyPatch,
    environment: str | None,
    path: str,
    spool: str,
    named: str | None,
    places: list[str],
) -> None:
    """An asterisk marks slurmd's own copies."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="host7.lab.example"))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    if environment is not None:
        monkeypatch.setenv("SLURM_CONF", environment)
    found = list_places(SlurmConfig("lab", path, spool, frozenset()), "n0", None if named is None else Path(named))
    name = "gres.conf" if named is None else "gpus.conf"
    assert found == [ConfPlace(Path(place.rstrip("*")) / name, place.endswith("*")) for place in places]


NODE = NodeRecord(H100, Gres(), slurmd_start=4_000_000_000.0)
FOUR = "NodeName=n9 Name=gpu File=/dev/nvidia9\nNodeName=n0 Name=gpu Type=h100 File=/dev/nvidia[0-3]\n"


def read_files(folder: Path, *texts: bytes, fetched: bool = False, record: NodeRecord = NODE) -> GpuOrder:
    """The order of node n0 from these files, named 0.conf and so on."""
    for number, text in enumerate(texts):
        (folder / f"{number}.conf").write_bytes(text)
    places = [ConfPlace(folder / f"{number}.conf", fetched) for number in range(max(2, len(texts)))]
    return read_order(places, "n0", record, vendor=NVIDIA).order


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (FOUR, 4),
        (
            "NodeName=n0 Name=gpu File=/dev/nvidia[0-1]\nNodeName=n[0-3] Name=gpu File=/dev/nvidia7\nName=shard Count=8\n",
            3,
        ),
        ("NodeName=n0 AutoDetect=nvml\n", 0),
        ("NodeName=n0 Name=gpu Count=4\n", 0),
        ("NodeName=n0 Name=gpu File=/dev/dri/renderD[128-129]\n", 0),
        ("NodeName=n9 Name=gpu File=/dev/nvidia[0-3]\n", 0),
        ("Name=gpu File=/dev/nvidia[0-3]\n", 0),
        ("NodeName=n0 Name=gpu File=/dev/nvidia[3-0]\n", 0),
    ],
    ids=["files", "lines", "AutoDetect", "no files", "another vendor", "another node", "any node", "no range"],
)
def test_gres_conf_alone_counts_the_gpus_that_it_names(tmp_path: Path, text: str, number: int) -> None:
    (tmp_path / "gres.conf").write_text(text, "utf-8")
    places = [ConfPlace(tmp_path / name) for name in ("none.conf", "gres.conf")]
    assert count_named(places, "n0", NVIDIA) == number


def test_files_that_agree_count_as_one_and_missing_files_are_ignored(tmp_path: Path) -> None:
    four = GpuOrder("minor", ("0", "1", "2", "3"))
    assert read_files(tmp_path, FOUR.encode()) == four
    assert read_files(tmp_path, FOUR.encode(), FOUR.encode() + b"# the same") == four
    assert read_files(tmp_path, b"#" * (MAX_CONF - len(FOUR) - 1) + b"\n" + FOUR.encode()) == four


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ([], "no gres.conf at {0}/0.conf, {0}/1.conf; {1}"),
        (
            [FOUR.encode(), FOUR.replace("[0-3]", "[3,2,1,0]").encode()],
            "{0}/0.conf and {0}/1.conf give the GPUs different orders; {1}",
        ),
        ([b"#" * (MAX_CONF + 1)], f"{{0}}/0.conf: it is longer than {MAX_CONF} bytes; {{1}}"),
        (
            [b"# \xff"],
            "{0}/0.conf: 'utf-8' codec can't decode byte 0xff in position 2: invalid start byte; {1}",
        ),
        (
            [b"AutoDetect=rsmi"],
            "{0}/0.conf: with AutoDetect=rsmi, the driver cannot confirm the order of the GPUs; set AutoDetect=off, and "
            "add Name=gpu File=/dev/nvidiaN",
        ),
        (
            [b"\nName=gpu Type=h100 File=/dev/nvidia0"],
            "{0}/0.conf:2: names 1 GPUs, but slurm.conf gives the node Gres=gpu:h100:4",
        ),
    ],
    ids=["none", "two-orders", "too-large", "no-text", "of-all-lines", "of-one-line"],
)
def test_files_that_prove_no_order_are_named_with_the_reason(tmp_path: Path, texts: list[bytes], problem: str) -> None:
    assert read_files(tmp_path, *texts) == GpuOrder("unknown", problem=problem.format(tmp_path, REMEDY))


def test_slurmd_uses_a_file_that_was_last_changed_before_or_in_the_second_of_its_start(tmp_path: Path) -> None:
    path, start = tmp_path / "0.conf", 4_000_000_000.0
    read_files(tmp_path, FOUR.encode())
    order = GpuOrder("minor", ("0", "1", "2", "3"))
    for date, changed in ((4_000_000_000.75, False), (4_000_000_001.0, True)):
        os.utime(path, (date, date))
        expected = GresContent(order, None, date, str(path)) if changed else GresContent(order, start, path=str(path))
        assert read_order([ConfPlace(path)], "n0", NODE, vendor=NVIDIA) == expected
    # slurmd wrote its own copy, at its start or when it was told to read its configuration again.
    assert read_order([ConfPlace(path, fetched=True)], "n0", NODE, vendor=NVIDIA) == GresContent(
        order, 4_000_000_001.0, path=str(path)
    )
    os.utime(path, (1.0, 1.0))
    before = NODE._replace(slurmd_start=path.stat().st_ctime + 100.0)
    assert read_order([ConfPlace(path, fetched=True)], "n0", before, vendor=NVIDIA).since == before.slurmd_start


def test_links_and_names_of_a_site_mean_the_device_that_they_lead_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = {"first": "nvidia2", "nvidia9": "nvidia3"}
    real = Path.stat

    def stat_of(path: Path, **options: bool) -> os.stat_result | SimpleNamespace:
        if path.parent != tmp_path or path.suffix or options:
            return real(path, **options)
        name = links.get(path.name, path.name)
        if name == "nvidia7":
            raise FileNotFoundError(path)
        major = 226 if name == "card0" else 195
        return SimpleNamespace(st_mode=stat.S_IFCHR | 0o666, st_rdev=os.makedev(major, int(name[-1])))

    monkeypatch.setattr(Path, "stat", stat_of)
    line = f"Name=gpu Type=h100 File={tmp_path}/first,{tmp_path}/nvidia9,{tmp_path}/nvidia7,{tmp_path}/nvidia1"
    assert read_files(tmp_path, line.encode()) == GpuOrder("minor", ("2", "3", "7", "1"))
    order = read_files(tmp_path, line.replace("first", "card0").encode())
    assert "card0' is not a device /dev/nvidiaN" in order.problem


@pytest.mark.parametrize("end", ["\\", "\\  \t", "\\  # and more"])
def test_a_line_continues_after_a_backslash_at_its_end(end: str) -> None:
    assert order(f"Name=gpu File=/dev/nvidia[0-1]{end}\n Type=h100", (("h100", 2),)).minors == ("0", "1")


def test_the_error_names_the_only_line_of_a_node_with_more_gpus_than_the_line_has() -> None:
    found = order("AutoDetect=nvml\nName=gpu File=/dev/nvidia0", (("", 2),))
    assert found.problem == "gres.conf:2: names 1 GPUs, but slurm.conf gives the node 2"


def test_autodetect_on_a_line_about_gpus_takes_precedence_at_any_place() -> None:
    text = "AutoDetect=off\nName=gpu AutoDetect=nvml File=/dev/nvidia0\nAutoDetect=off"
    assert order(text, (("", 1),)).kind == "index"
