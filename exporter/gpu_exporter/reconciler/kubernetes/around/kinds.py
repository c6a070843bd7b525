"""Finds the class of a pod: it serves requests, is used interactively, or runs a batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.decision.surroundings import BATCH, INTERACTIVE, SERVING, UNCLEAR
from gpu_exporter.reconciler.kubernetes.client.keys import is_batch
from gpu_exporter.reconciler.kubernetes.client.routes import Route
from gpu_exporter.reconciler.kubernetes.owners import Owner

# API group (without version) and kinds of controllers above a pod that serves, from the definitions of each stack. The
# chart grants `get` on them (reconciler.ownerResources).
SERVING_STACKS: Mapping[str, Sequence[str]] = {
    "apps.nvidia.com": ("NIMService",),
    "disaggregatedset.x-k8s.io": ("DisaggregatedSet",),
    "grove.io": ("PodClique", "PodCliqueScalingGroup", "PodCliqueSet"),
    "kubeai.org": ("Model",),
    "leaderworkerset.x-k8s.io": ("LeaderWorkerSet",),
    "machinelearning.seldon.io": ("SeldonDeployment",),
    "mlops.seldon.io": ("Server",),
    "nvidia.com": ("DynamoComponentDeployment", "DynamoGraphDeployment"),
    "ome.io": ("InferenceService",),
    "orchestration.aibrix.ai": ("RoleSet", "StormService"),
    "production-stack.vllm.ai": ("VLLMRuntime",),
    "ray.io": ("RayService",),
    "serving.knative.dev": ("Revision", "Service"),
    "serving.kserve.io": ("InferenceService", "LLMInferenceService", "ServingRuntime"),
    "serving.yatai.ai": ("BentoDeployment",),
    "workload.serving.volcano.sh": ("ModelServing",),
    "workloads.x-k8s.io": ("RoleBasedGroup",),
}
# Labels that these stacks set on servers. Anybody can set them, so without a route or controller they prove nothing.
SERVING_LABELS = (
    "serving.kserve.io/inferenceservice",
    "serving.knative.dev/service",
    "llm-d.ai/inferenceServing",
    "nvidia.com/dynamo-component-type",
    "model.aibrix.ai/name",
)
INTERACTIVE_KINDS = frozenset((("kubeflow.org", "Notebook"), ("kubeflow.org", "Workspace")))
# Kubeflow's notebooks, and the servers that JupyterHub starts for its users.
INTERACTIVE_LABELS = (("notebook-name", None), ("component", "singleuser-server"))


class Signs(NamedTuple):
    """The signs of a server that the site adds, from `policy.serving_kinds` and `policy.serving_labels`.

    `kinds`: each as KIND or GROUP/KIND. `labels`: each as a key and its value; None matches any value.
    """

    kinds: frozenset[str] = frozenset()
    labels: tuple[tuple[str, str | None], ...] = ()

    @classmethod
    def of(cls, policy: Policy) -> Signs:
        """Returns the signs in these settings."""
        return _signs(policy.serving_kinds, policy.serving_labels)


NO_SIGNS = Signs()


@lru_cache(maxsize=1)
def _signs(kinds: str, labels: str) -> Signs:
    pairs = (label.partition("=") for label in labels.replace(" ", "").split(",") if label)
    return Signs(
        frozenset(kinds.replace(" ", "").split(",")) - {""},
        tuple((key, value if equals else None) for key, equals, value in pairs),
    )


def classify(
    labels: Mapping[str, str], owners: Sequence[Owner], route: Route, signs: Signs = NO_SIGNS
) -> tuple[str, str]:
    """Returns the class of a pod, and the object or label that shows it.

    `owners`: nearest first. `route`: the object that sends requests to the pod or scales it. Notebooks are checked
    before routes, because every notebook has a Service. A weak route is checked last.
    """
    if found := next((owner.title for owner in owners if _serves(owner, signs)), ""):
        return SERVING, found
    if found := _label_in(labels, signs.labels):
        return SERVING, found
    if found := next((owner.title for owner in owners if (owner.group, owner.kind) in INTERACTIVE_KINDS), ""):
        return INTERACTIVE, found
    if found := _label_in(labels, INTERACTIVE_LABELS):
        return INTERACTIVE, found
    if route.title and not route.is_weak:
        return SERVING, route.title
    for owner in owners:
        if is_batch(owner.group, owner.kind):
            return BATCH, owner.title
    return (SERVING, route.title) if route.title else (UNCLEAR, "")


def _serves(owner: Owner, signs: Signs) -> bool:
    named = {owner.kind, f"{owner.group}/{owner.kind}"}
    return owner.kind in SERVING_STACKS.get(owner.group, ()) or not named.isdisjoint(signs.kinds)


def _label_in(labels: Mapping[str, str], wanted: Sequence[tuple[str, str | None]]) -> str:
    return next((f"label {key}" for key, value in wanted if key in labels and value in (None, labels[key])), "")


def serving_doubt(labels: Mapping[str, str], unread: str) -> str:
    """Returns why a pod of class unclear may be a server, with the remedy; "" without such a sign.

    `unread`: why some routes are not known, with the remedy; "" if all are known.
    """
    if unread:
        return f"it may be a server: {unread}"
    found = next((key for key in SERVING_LABELS if key in labels), "")
    remedy = (
        "no Service, InferencePool, autoscaler or controller confirms it; to accept the label, add it to "
        "policy.serving_labels"
    )
    return f"its label {found} names a server, but {remedy}" if found else ""
