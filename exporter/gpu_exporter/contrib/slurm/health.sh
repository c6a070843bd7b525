#!/bin/sh
# gpu-exporter as HealthCheckProgram: a node takes no new jobs if one of its GPUs does not answer, is unusable or reported
# a fault, or if Slurm counts more GPUs than answer.
#
# In slurm.conf: HealthCheckProgram=/etc/slurm/gpu-health.sh, HealthCheckInterval=300. Slurm ends the program after 60 s. It
# checks only devices, so an outage of slurmctld or the kubelet drains no node. For fewer checks, replace "devices" by a
# list such as lost,remap,reset,fabric,ready,count (docs/slurm.md). It reports the GPU and its fault. With the
# line GPU_EXPORTER_DRAIN=yes (slurmd passes no such variable) it drains the node, with this report as the reason; otherwise
# the report is only in slurmd's log, with SlurmdDebug=debug2.
report=$(timeout 30 gpu-exporter --once --check=devices --timeout=20s 2>&1 >/dev/null)
case $? in
3 | 4) ;;
126 | 127)
	echo "gpu-health: cannot run gpu-exporter, so the GPUs are not checked: link it to /usr/local/bin, or add its directory to PATH in this file (PATH=$PATH)"
	exit 0 # not a fault of the GPUs
	;;
*) exit 0 ;; # no fault, no GPU is expected, or the check itself failed, which is not a fault of the GPUs
esac
echo "$report"
[ "${GPU_EXPORTER_DRAIN:-no}" = yes ] || exit 0
# The reason names each check that failed, and the remedy; the log contains each fault. Every user of Slurm can read it.
reason=$(printf '%s\n' "$report" | sed -n 's/^gpu-exporter: failed checks: //p' | head -n 1)
scontrol update NodeName="${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN Reason="gpu-exporter: ${reason:-not all GPUs answer}"
exit 0
