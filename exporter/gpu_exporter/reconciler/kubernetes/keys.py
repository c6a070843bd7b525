"""Labels, annotations and kinds of other tools that the reconciler reads.

It keeps these, its own keys, and up to 16 KiB of other labels.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from gpu_exporter.reconciler.marks import PREFIX

Kind: TypeAlias = tuple[str, str]  # API group and kind
CLASS = PREFIX + "class"
# Labels or annotations, each with the name of a group within the pod's namespace.
GROUPS = (
    "kueue.x-k8s.io/pod-group-name",
    "jobset.sigs.k8s.io/jobset-uid",
    "jobset.sigs.k8s.io/jobset-name",
    "leaderworkerset.sigs.k8s.io/group-key",
    "scheduling.k8s.io/group-name",  # Volcano, and kube-batch before it
    "scheduling.volcano.sh/group-name",
    "volcano.sh/job-name",
    "scheduling.x-k8s.io/pod-group",  # scheduler-plugins, and its forms of before
    "pod-group.scheduling.sigs.k8s.io",
    "pod-group.scheduling.sigs.k8s.io/name",
    "gang.scheduling.koordinator.sh/name",
    "armadaproject.io/gangId",
    "pod-group-name",  # KAI and Run:ai
    "godel.bytedance.com/pod-group-name",
    "grove.io/podgang",
    "yunikorn.apache.org/app-id",  # YuniKorn's task groups are parts of an application
    "applicationId",
    "training.kubeflow.org/job-name",
    "ray.io/cluster",
)
# YuniKorn puts all pods of a namespace that name no application into one: unity/yunikorn-k8shim, admission controller.
NO_GROUP = re.compile(r"yunikorn-.*-autogen")
# Several groups that are scheduled together, each as NAMESPACE/NAME, in a list of JSON.
GROUP_LISTS = ("gang.scheduling.koordinator.sh/groups", "pod-group.scheduling.sigs.k8s.io/groups")
# What a gang scheduler of any name calls a gang, in the key of a label or annotation, also within camelCase.
GANG_SIGN = re.compile(r"(?i:pod[-_]?group|task[-_]?group)|(?<![a-z])gang(?![a-z])|Gang(?![a-z])|GANG")
# How a key that names the gang ends, without what stands between its words.
GANG_NAMES = tuple(f"{gang}{name}" for gang in ("podgroup", "gang") for name in ("", "name", "id", "key", "uid"))
NAMES = frozenset(("name", "id", "key", "uid"))  # ... or after the domain of a gang
# Domains of one scheduler's keys.
DOMAINS = {
    "applicationId": "yunikorn.apache.org",
    "scheduling.x-k8s.io": "pod-group.scheduling.sigs.k8s.io",
}
SIGNS_MAX = 8  # of an object, that are kept beside those of GROUPS
KUEUE_GROUP, KUEUE_TOTAL = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
# Signs that a pod is not to be disturbed. The presence of descheduler.alpha.kubernetes.io/evict means the opposite of
# one, whatever its value.
OTHERS = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "descheduler.alpha.kubernetes.io/prefer-no-eviction": None,  # any value
}
MIRROR = "kubernetes.io/config.mirror"  # the kubelet's image of a static pod, on which no write has an effect
STOPPED = "kubeflow-resource-stopped"  # Kubeflow's notebook controller scales a Notebook with it to nothing
QUEUE = "kueue.x-k8s.io/queue-name"  # on whatever Kueue manages
# Of a pod or Job, its part of what is above it: of a JobSet, of Kubeflow's training operator and of its MPI operator.
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
REPLICA_TYPE, JOB_ROLE, JOB_NAME = (
    f"training.kubeflow.org/{name}" for name in ("replica-type", "job-role", "job-name")
)
PARTS = (QUEUE, REPLICATED_JOB, REPLICA_TYPE, JOB_ROLE, JOB_NAME)
# Labels and annotations that are kept however many others an object has.
READ = frozenset((*GROUPS, *GROUP_LISTS, KUEUE_TOTAL, *OTHERS, MIRROR, STOPPED, *PARTS))
# Kinds whose spec and status are looked at: of any other controller only its metadata is.
JOB: Kind = ("batch", "Job")
STATEFUL_SET: Kind = ("apps", "StatefulSet")
COUNTED = frozenset(
    (
        JOB,
        STATEFUL_SET,
        ("jobset.x-k8s.io", "JobSet"),
        *(("kubeflow.org", f"{name}Job") for name in ("PyTorch", "TF", "XGBoost", "Paddle", "JAX", "MPI")),
        ("kubeflow.org", "Notebook"),
        ("kueue.x-k8s.io", "Workload"),
    )
)


def names_gang(key: str) -> bool:
    """Whether the value of a label or annotation with this key is the name of a gang."""
    if not GANG_SIGN.search(key):
        return False
    domain, _, last = key.rpartition("/")
    word = re.sub("[-_.]", "", last).lower()
    return word.endswith(GANG_NAMES) or (word in NAMES and GANG_SIGN.search(domain) is not None)


def domain_of(key: str) -> str:
    """Whose key it is: what stands before the slash, or all of a key that is a domain."""
    domain = key.partition("/")[0] if "/" in key or "." in key else DOMAINS.get(key, "")
    return DOMAINS.get(domain, domain)
