#!/bin/sh
# gpu-exporter as HealthCheckProgram: a node whose GPUs do not all answer takes no new jobs.
#
# In slurm.conf: HealthCheckProgram=/etc/slurm/gpu-health.sh, HealthCheckInterval=300. Slurm ends it after 60 s. It looks at
# devices alone, so an outage of slurmctld or the kubelet drains no node. What it does is said below, by words of its own:
# GPU_EXPORTER_DRAIN=yes drains the node, everything else only says so in slurmd's log.
report=$(timeout 30 gpu-exporter --once --check=devices --timeout=20s 2>&1 >/dev/null)
case $? in
3) reason="no GPU answers" ;;
4) reason="not all GPUs answer" ;;
*) exit 0 ;; # all is well, no GPU is expected, or the check itself failed, which is no fault of the GPUs
esac
echo "gpu-exporter: $reason: $report"
[ "${GPU_EXPORTER_DRAIN:-no}" = yes ] || exit 0
scontrol update NodeName="${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN Reason="gpu-exporter: $reason"
exit 0
