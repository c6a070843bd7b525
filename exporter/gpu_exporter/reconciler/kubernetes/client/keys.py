"""Labels, annotations and kinds of other tools that the reconciler reads.

Of the metadata of an object, the reconciler keeps these keys, its own keys, and up to 16 KiB of labels.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from gpu_exporter.reconciler.marks import PREFIX

Kind: TypeAlias = tuple[str, str]  # API group and kind
CLASS = PREFIX + "class"
# Labels or annotations whose value names a group in the pod's namespace.
GROUPS = (
    "kueue.x-k8s.io/pod-group-name",
    "jobset.sigs.k8s.io/jobset-uid",
    "jobset.sigs.k8s.io/jobset-name",
    "leaderworkerset.sigs.k8s.io/group-key",
    "scheduling.k8s.io/group-name",  # Volcano, and kube-batch before it
    "scheduling.volcano.sh/group-name",
    "volcano.sh/job-name",
    "scheduling.x-k8s.io/pod-group",  # scheduler-plugins, and its older keys
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
# YuniKorn's name for all pods of a namespace that name no application (unity/yunikorn-k8shim, admission controller).
NO_GROUP = re.compile(r"yunikorn-.*-autogen")
# JSON lists of groups that are scheduled together, each as NAMESPACE/NAME.
GROUP_LISTS = ("gang.scheduling.koordinator.sh/groups", "pod-group.scheduling.sigs.k8s.io/groups")
# Words for a gang in the key of a label or annotation of any gang scheduler, also within camelCase.
GANG_SIGN = re.compile(r"(?i:pod[-_]?group|task[-_]?group)|(?<![a-z])gang(?![a-z])|Gang(?![a-z])|GANG")
# Endings of a key whose value is the name of the gang; separators between its words are removed.
GANG_NAMES = tuple(f"{gang}{name}" for gang in ("podgroup", "gang") for name in ("", "name", "id", "key", "uid"))
NAMES = frozenset(("name", "id", "key", "uid"))  # whole last parts of such a key, after a domain that means a gang
# Keys and domains that belong to the domain of one scheduler.
DOMAINS = {
    "applicationId": "yunikorn.apache.org",
    "scheduling.x-k8s.io": "pod-group.scheduling.sigs.k8s.io",
}
SIGNS_MAX = 8  # annotations of an object with a word for a gang that are kept, in addition to the known keys
KUEUE_GROUP, KUEUE_TOTAL = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
# Annotations that forbid other tools to disturb a pod. descheduler.alpha.kubernetes.io/evict is not among them:
# with any value it means the opposite.
OTHERS = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "descheduler.alpha.kubernetes.io/prefer-no-eviction": None,  # any value
}
MIRROR = "kubernetes.io/config.mirror"  # on the kubelet's mirror of a static pod, where writes have no effect
STOPPED = "kubeflow-resource-stopped"  # Kubeflow's notebook controller scales a Notebook with it to zero
QUEUE = "kueue.x-k8s.io/queue-name"  # on objects that Kueue manages
# The role of a pod or Job: in a JobSet, under Kubeflow's training operator and under its MPI operator.
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
REPLICA_TYPE, JOB_ROLE, JOB_NAME = (
    f"training.kubeflow.org/{name}" for name in ("replica-type", "job-role", "job-name")
)
PARTS = (QUEUE, REPLICATED_JOB, REPLICA_TYPE, JOB_ROLE, JOB_NAME)
# Labels and annotations that are always kept.
READ = frozenset((*GROUPS, *GROUP_LISTS, KUEUE_TOTAL, *OTHERS, MIRROR, STOPPED, *PARTS))
# Kinds whose spec and status are read. Of any other controller only the metadata is read.
JOB: Kind = ("batch", "Job")
STATEFUL_SET: Kind = ("apps", "StatefulSet")
DAEMON_SET: Kind = ("apps", "DaemonSet")
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
# Controllers that run a batch. Their own Services and autoscalers show no server.
BATCH_KINDS: frozenset[Kind] = frozenset(
    (
        JOB,
        ("batch", "CronJob"),
        ("batch.volcano.sh", "Job"),
        ("jobset.x-k8s.io", "JobSet"),
        ("trainer.kubeflow.org", "TrainJob"),
        ("ray.io", "RayJob"),
        ("argoproj.io", "Workflow"),
        ("sparkoperator.k8s.io", "SparkApplication"),
    )
)
TRAINING_GROUP = "kubeflow.org"  # MPIJob, PyTorchJob, TFJob, XGBoostJob, PaddleJob, JAXJob


def is_batch(group: str, kind: str) -> bool:
    """Returns whether a controller of this kind runs a batch."""
    return (group, kind) in BATCH_KINDS or (group == TRAINING_GROUP and kind.endswith("Job"))


def names_gang(key: str) -> bool:
    """Returns whether a label or annotation with this key contains the name of a gang."""
    if not GANG_SIGN.search(key):
        return False
    domain, _, last = key.rpartition("/")
    word = re.sub("[-_.]", "", last).lower()
    return word.endswith(GANG_NAMES) or (word in NAMES and GANG_SIGN.search(domain) is not None)


def domain_of(key: str) -> str:
    """Returns the domain of a key: the part before the slash. A key that is a domain is returned as it is."""
    domain = key.partition("/")[0] if "/" in key or "." in key else DOMAINS.get(key, "")
    return DOMAINS.get(domain, domain)
