"""Published power and activity of real boards at work, at rest and in a hang. A scenario selects a level in `work`.

This table is independent of the thresholds that judge such levels (`stalls` in defaults.yaml); otherwise, a test would
prove nothing. A value without a publication has the source "assumption".

Power is in watts, traffic in bytes per second (sum of both directions). All other values are ratios from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.agent.devices.loads import Constant, Load, Square, StagedLoad
from gpu_exporter.agent.devices.products import Product

WOBBLE_S = 46.0  # period of the power's variation, no multiple of the exporter's means over ten seconds


class Level(NamedTuple):
    """Power and activity of a board. `wobble_w`: amplitude of the power's variation in watts. `source`: publication of
    the power value.
    """

    utilization: float
    watts: float
    wobble_w: float = 0.0
    sm: float = 0.0
    tensor: float = 0.0
    fp64: float = 0.0
    dram: float = 0.0
    pcie: float = 0.0
    nvlink: float = 0.0
    source: str = ""


ASSUMED = "ratios of GPM: assumption"
H200 = "recorded on an H200, tests/fixtures/recordings"
LEVELS: Mapping[tuple[str, str], Level] = {
    # H100 SXM, default limit 700 W
    ("H100", "rest"): Level(0.0, 70, source="SC'24 power study"),
    ("H100", "context"): Level(0.0, 133, source="129 to 137 W, nccl#1550; 109 W, gpu-burn#114"),
    ("H100", "train"): Level(
        1.0, 600, 30, 0.8, 0.45, dram=0.4, nvlink=8e10, source="500 to 690 W, NeMo Speech#9291; " + ASSUMED
    ),
    ("H100", "hang"): Level(1.0, 100, 1, 0.12, source="about 100 W after 500 to 690, NeMo Speech#9291; " + ASSUMED),
    ("H100", "hang-152"): Level(1.0, 152, 1, 0.12, source="nccl#1550, the others at 0 %; " + ASSUMED),
    ("H100", "hang-polls"): Level(1.0, 123, 0.5, 0.1212, pcie=9.7e8, source=f"16 channels over a network; {H200}"),
    ("H100", "hang-two-sms"): Level(1.0, 123, 0.5, 0.0152, pcie=1.2e8, source=f"2 channels over a network; {H200}"),
    ("H100", "decode"): Level(1.0, 200, 12, 0.6, 0.03, dram=0.55, source="159 to 253 W, InferenceX#828; " + ASSUMED),
    ("H100", "evaluate"): Level(0.98, 300, 20, 0.5, 0.2, dram=0.3, source="assumption"),
    ("H100", "one-block"): Level(1.0, 110, 0.5, 0.0076, fp64=0.004, source="assumption: one block of 132 SMs, FP64"),
    ("H100", "small-kernel"): Level(1.0, 110, 0.5, 0.06, fp64=0.02, source="assumption: eight blocks, FP64"),
    ("H100", "integer"): Level(1.0, 105, 0.5, 0.0076, source="assumption: one block, integers only, never ends"),
    ("H100", "steady-250"): Level(1.0, 250, 1, 0.7, 0.02, dram=0.5, source="within 159 to 253 W, InferenceX#828"),
    # A100 SXM, default limit 400 W, no GPM
    ("A100", "rest"): Level(0.0, 56, source="recording A100_5050 of the SC'24 power study"),
    ("A100", "context"): Level(0.0, 75, source="70 to 81 W in public reports"),
    ("A100", "train"): Level(1.0, 350, 20, nvlink=4e10, source="assumption: near the limit"),
    ("A100", "hang"): Level(1.0, 80, 1, source="assumption: above a context at rest, as on V100 and H100"),
    ("A100", "llm-100"): Level(1.0, 100, 8, pcie=2e7, source="a sixth of the samples of Acme (Hu et al., NSDI'24)"),
    ("A100", "zero3"): Level(1.0, 79, 1, pcie=4e8, source="'very low power' at 100 %, LlamaFactory#3520"),
    ("A100", "steady-150"): Level(1.0, 150, 1, source="assumption"),
    # V100 SXM2, default limit 300 W, no GPM
    ("V100", "rest"): Level(0.0, 40, source="SC'24 power study"),
    ("V100", "train"): Level(1.0, 270, 15, nvlink=2e10, source="assumption: near the limit"),
    ("V100", "hang"): Level(1.0, 70, 1, source="65 to 76 of 300 W, pytorch#22671"),
    ("V100", "decode"): Level(1.0, 190, 8, source="180 to 200 W in public reports"),
    # Blackwell and Grace Hopper. No power in a hang is published, so none is here.
    ("GH200", "rest"): Level(0.0, 73, source="ubccr/ccr-examples; 76 to 100 W elsewhere"),
    ("GH200", "context"): Level(0.0, 95, source="48 GB in use, a public nvidia-smi output"),
    ("B200", "rest"): Level(0.0, 136, source="Modal GPU Glossary: 136 to 142 W on eight boards"),
    ("B200", "context"): Level(0.0, 192, source="192 to 196 W, TensorRT-LLM#10278"),
    ("GB200", "rest"): Level(0.0, 156, source="NVIDIA/aicr; 157 to 181 W elsewhere"),
    ("GB200", "train"): Level(
        0.9855,
        984,
        sm=0.324,
        tensor=0.324,
        dram=0.241,
        source="512 GPUs, marin#7344; SMs: at least as the tensor pipes",
    ),
    ("B300", "rest"): Level(0.0, 135, source="blog.john-pfeiffer.com; 139 to 185 W elsewhere"),
    ("B300", "tune"): Level(0.98, 404, 10, 0.56, 0.12, source="395 to 414 W, fine tuning of SDXL, public notes"),
    ("GB300", "rest"): Level(0.0, 171, source="171 to 175 W, ishandhanani.github.io; 227 to 237 W elsewhere"),
    # T4, default limit 70 W
    ("T4", "train"): Level(1.0, 66, 2, source="assumption: near the limit"),
    ("T4", "hang"): Level(1.0, 40, 0.5, source="40 to 41 W, accelerate#233"),
}


def compile_work(model: str, product: Product, stages: Sequence[tuple[float, str]]) -> tuple[Load, dict[str, Load]]:
    """Returns a GPU's load, and the loads of its parts, from a list of (start in seconds, level). Raises KeyError."""
    levels = [(start, LEVELS[model, name]) for start, name in stages]
    full_w = 0.9 * product.power_limit - product.idle_power  # the simulated power at load 1, above rest

    def share(watts: float) -> float:
        return (watts - product.idle_power) / full_w

    def part(pick: str, scale: float = 1.0) -> Load:
        return StagedLoad(
            [(start, Constant(getattr(level, pick) / scale if scale else 0.0)) for start, level in levels]
        )

    power = StagedLoad(
        [
            (start, Square(share(level.watts - level.wobble_w), share(level.watts + level.wobble_w), WOBBLE_S, 0.5))
            for start, level in levels
        ]
    )
    parts = {name: part(name) for name in ("sm", "tensor", "fp64", "dram")}
    # A simulated link at load 1 moves its rate in one direction, and half of it in the other.
    parts |= {name: part(name, 1.5 * getattr(product, name)) for name in ("pcie", "nvlink")}
    parts |= {"power": power, "graphics": part("utilization"), "fp32": Constant(0.0), "fp16": Constant(0.0)}
    return part("utilization"), parts
