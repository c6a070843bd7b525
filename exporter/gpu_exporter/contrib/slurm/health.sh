#!/bin/sh
# gpu-exporter as HealthCheckProgram: a node whose GPUs do not all answer, or are fewer than Slurm counts, takes no new
# jobs.
#
# In slurm.conf: HealthCheckProgram=/etc/slurm/gpu-health.sh, HealthCheckInterval=300. Slurm ends it after 60 s. It looks at
# devices alone, so an outage of slurmctld or the kubelet drains no node. It says which GPU, and what is wrong with it:
# GPU_EXPORTER_DRAIN=yes drains the node with that reason, everything else only writes it to slurmd's log.
report=$(timeout 30 gpu-exporter --once --check=devices --timeout=20s 2>&1 >/dev/null)
case $? in
3 | 4) ;;
*) exit 0 ;; # all is well, no GPU is expected, or the check itself failed, which is no fault of the GPUs
esac
echo "$report"
[ "${GPU_EXPORTER_DRAIN:-no}" = yes ] || exit 0
# The first fault; the log has the others. Slurm keeps what stands in Reason for everybody to read.
faults=$(printf '%s\n' "$report" | sed -n -e 's/^gpu-exporter: partial: //p' -e 's/^gpu-exporter: \(no GPU data: \)/\1/p')
more=$(($(printf '%s\n' "$faults" | wc -l) - 1))
reason=$(printf '%s\n' "${faults:-not all GPUs answer}" | head -n 1 | cut -c 1-200)
[ "$more" -gt 0 ] && reason="$reason, and $more more"
scontrol update NodeName="${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN Reason="gpu-exporter: $reason"
exit 0
