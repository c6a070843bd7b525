"""Finds the class of a pod: it serves requests, is used interactively, or runs a batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_exporter.reconciler.decision.surroundings import BATCH, INTERACTIVE, SERVING, UNCLEAR
from gpu_exporter.reconciler.kubernetes.owners import Owner

# API group (without version) and kind of controllers above a pod.
SERVING_KINDS = frozenset(
    (
        ("serving.kserve.io", "InferenceService"),
        ("serving.kserve.io", "LLMInferenceService"),
        ("serving.knative.dev", "Service"),
        ("serving.knative.dev", "Revision"),
        ("ray.io", "RayService"),
        ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"),
        ("apps.nvidia.com", "NIMService"),
        ("machinelearning.seldon.io", "SeldonDeployment"),
    )
)
SERVING_LABELS = ("serving.kserve.io/inferenceservice", "serving.knative.dev/service")
INTERACTIVE_KINDS = frozenset((("kubeflow.org", "Notebook"), ("kubeflow.org", "Workspace")))
# Kubeflow's notebooks, and the servers that JupyterHub starts for its users.
INTERACTIVE_LABELS = (("notebook-name", None), ("component", "singleuser-server"))
BATCH_KINDS = frozenset(
    (
        ("batch", "Job"),
        ("batch", "CronJob"),
        ("batch.volcano.sh", "Job"),
        ("jobset.x-k8s.io", "JobSet"),
        ("trainer.kubeflow.org", "TrainJob"),
        ("ray.io", "RayJob"),
        ("argoproj.io", "Workflow"),
    )
)
TRAINING_GROUP = "kubeflow.org"  # MPIJob, PyTorchJob, TFJob, XGBoostJob, PaddleJob, JAXJob


def classify(labels: Mapping[str, str], owners: Sequence[Owner], server: str) -> tuple[str, str]:
    """The class of a pod, and the object or label that shows it.

    `owners`: nearest first. `server`: the Service or autoscaler in front of the pod, "" for none. Notebooks are checked
    before Services, because every notebook has a Service.
    """
    kinds = {(owner.group, owner.kind): owner.title for owner in owners}
    if found := next((title for kind, title in kinds.items() if kind in SERVING_KINDS), ""):
        return SERVING, found
    if found := next((key for key in SERVING_LABELS if key in labels), ""):
        return SERVING, f"label {found}"
    if found := next((title for kind, title in kinds.items() if kind in INTERACTIVE_KINDS), ""):
        return INTERACTIVE, found
    for key, value in INTERACTIVE_LABELS:
        if key in labels and value in (None, labels[key]):
            return INTERACTIVE, f"label {key}"
    if server:
        return SERVING, server
    for (group, kind), title in kinds.items():
        if (group, kind) in BATCH_KINDS or (group == TRAINING_GROUP and kind.endswith("Job")):
            return BATCH, title
    return UNCLEAR, ""
