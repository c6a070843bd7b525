"""gres.conf: what an IDX means, and when nothing proves it. The orders are those that slurmd 22.05 and 24.11 made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.attribution.gres_conf import MAX_INCLUDES, GpuOrder, GresConfError, order_of, parse_gres_conf

H100 = (("h100", 4),)


def order(text: str, configured: tuple[tuple[str, int], ...] = H100, node: str = "n0") -> GpuOrder:
    return order_of(parse_gres_conf(text, "gres.conf"), node, configured)


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
def test_files_name_the_gpus_of_a_node_by_type_and_line(
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
def test_autodetect_counts_in_the_order_of_nvml_whatever_the_files_say(text: str, minors: tuple[str, ...]) -> None:
    assert order(text) == GpuOrder("index", minors, 4)


@pytest.mark.parametrize(
    ("text", "configured", "problem"),
    [
        ("", H100, "no line names a GPU of node n0; add Name=gpu File=/dev/nvidiaN"),
        (
            "Name=gpu Type=h100 Count=4",
            H100,
            "gres.conf:1: Name=gpu without File= names no device; add File=/dev/nvidiaN",
        ),
        ("AutoDetect=rsmi", H100, "AutoDetect=rsmi does not list GPUs in an order that NVML confirms"),
        (
            "Name=gpu Type=h100 File=/dev/nvidia[0-2]",
            H100,
            "gres.conf:1: names 3 GPUs for the node's Gres=gpu:h100:4 in slurm.conf",
        ),
        (
            "Name=gpu Type=h100 File=/dev/nvidia[0-3]\nName=gpu Type=a100 File=/dev/nvidia4",
            H100,
            "gres.conf:2: this GPU is not in the node's Gres in slurm.conf",
        ),
        (
            "AutoDetect=nvml\nName=gpu Type=h100 File=/dev/nvidia[0-2]",
            H100,
            "gres.conf:2: names 3 GPUs, but the node has 4 in slurm.conf",
        ),
        (
            "AutoDetect=nvml\nName=gpu File=/dev/nvidia0\nName=gpu Type=h100",
            H100,
            "gres.conf:3: lines with and without File= under AutoDetect=nvml prove no order; give all of them File=, "
            "or none",
        ),
        (
            "AutoDetect=nvml\nName=gpu MultipleFiles=/dev/nvidia4,/dev/nvidia-caps/nvidia-cap30",
            H100,
            "gres.conf:2: MIG devices are not resolved by their position",
        ),
    ],
)
def test_what_proves_no_order_is_unknown_with_line_and_remedy(
    text: str, configured: tuple[tuple[str, int], ...], problem: str
) -> None:
    assert order(text, configured) == GpuOrder("unknown", problem=problem)


def test_a_mig_device_of_several_files_is_one_position_and_no_whole_gpu() -> None:
    text = "Name=gpu File=/dev/nvidia0\nName=gpu MultipleFiles=/dev/nvidia4,/dev/nvidia-caps/nvidia-cap30"
    assert order(text, (("", 2),)).minors == ("0", "")


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
        ("Include other.conf", "gres.conf:1: Include is not followed any deeper"),
    ],
)
def test_what_is_not_understood_is_refused_by_line(text: str, error: str) -> None:
    with pytest.raises(GresConfError) as caught:
        order(text)
    assert str(caught.value) == error


def test_included_files_count_where_they_stand() -> None:
    files = {"more.conf": "Name=gpu File=/dev/nvidia2\n", "loop.conf": "Include loop.conf\n"}
    lines = parse_gres_conf(
        "Name=gpu File=/dev/nvidia1\nInclude more.conf\nName=gpu File=/dev/nvidia0", "g", files.__getitem__
    )
    assert order_of(lines, "n0", (("", 3),)).minors == ("1", "2", "0")
    with pytest.raises(GresConfError, match=r"loop\.conf:1: Include is not followed any deeper"):
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
def test_any_file_gives_an_order_of_whole_length_or_says_why_not(
    text: str, configured: tuple[tuple[str, int], ...]
) -> None:
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
        order_of(parse_gres_conf("Include a.conf", "g", files.__getitem__), "n0", (("", 1),))
    assert str(caught.value) == "b.conf:5: unknown key 'fiel'"
    files["b.conf"] = files["b.conf"].rpartition("Name")[0]
    assert [line.place for line in parse_gres_conf("Include a.conf", "g", files.__getitem__)] == ["b.conf:3"]


def test_a_chain_of_includes_is_followed_so_far_and_no_further() -> None:
    files = {f"{number}.conf": f"Include {number + 1}.conf\n" for number in range(MAX_INCLUDES)}
    files[f"{MAX_INCLUDES}.conf"] = "Name=gpu File=/dev/nvidia0\n"
    assert len(parse_gres_conf("Include 1.conf", "g", files.__getitem__)) == 1
    with pytest.raises(GresConfError, match=rf"{MAX_INCLUDES - 1}\.conf:1: Include is not followed any deeper"):
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
            "gres.conf:1: names 0 GPUs for the node's Gres=gpu:a100:2 in slurm.conf",
        ),
        (
            "Name=gpu Type=h100 File=/dev/nvidia0\nName=gpu Type=a100 File=/dev/nvidia1",
            (("", 2),),
            "gres.conf:1: names 0 GPUs for the node's Gres=gpu:2 in slurm.conf",
        ),
        (
            "Name=gpu Type=h100 File=/dev/nvidia[0-1]",
            (("", 1), ("h100", 1)),
            "gres.conf:1: names 0 GPUs for the node's Gres=gpu:1 in slurm.conf",
        ),
    ],
)
def test_gpus_of_other_types_than_slurm_conf_counts_prove_no_order(
    text: str, configured: tuple[tuple[str, int], ...], problem: str
) -> None:
    assert order(text, configured) == GpuOrder("unknown", problem=problem)


def test_autodetect_on_a_line_of_gpus_overrides_the_one_for_all() -> None:
    text = "AutoDetect=off\nName=gpu AutoDetect=nvml File=/dev/nvidia[0-3]"
    assert order(text).kind == "index"
    with pytest.raises(GresConfError, match=r"gres\.conf:1: File and MultipleFiles exclude each other"):
        order("Name=gpu File=/dev/nvidia0 MultipleFiles=/dev/nvidia1")


def test_a_fault_in_a_line_about_other_nodes_or_other_resources_costs_this_node_nothing() -> None:
    text = "NodeName=n9 Name=gpu Fiel=x\nName=nic Speed=fast File=/dev/nic0\nName=gpu Files=/dev/nvidia0 Link=0"
    assert order(text, (("", 1),)).minors == ("0",)
