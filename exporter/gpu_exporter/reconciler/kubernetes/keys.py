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
# What a gang scheduler of any name calls a gang, in the key of a label or annotation.
GANG_SIGN = re.compile(r"pod-?group|task-?group|(?<![a-z])gang(?![a-z])", re.IGNORECASE)
# Of these keys, those whose value is the name of the gang.
GANG_NAME = re.compile(
    r".*(pod-?group|(?<![a-z])gang)([./-]?(name|id|key|uid))?|.*(pod-?group|(?<![a-z])gang)[^/]*/(name|id|key|uid)",
    re.IGNORECASE,
)
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
READ = frozenset((*GROUPS, KUEUE_TOTAL, *OTHERS, MIRROR, STOPPED, *PARTS))
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
