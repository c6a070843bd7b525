#!/bin/sh
# gpu-exporter: says which GPUs of this node a job has, so that the exporter need not ask slurmctld.
#
# In slurm.conf: Prolog=/etc/slurm/prolog.d/gpu-exporter.sh and PrologFlags=Alloc (or Contain, which includes it, and
# shows the exporter jobs that have no step). Runs as root at the start of each job; ends with 0 whatever happens, since
# a prolog that fails drains the node. Starts mkdir and mv, and asks nobody.
directory=${GPU_EXPORTER_JOB_FILES:-/run/gpu-exporter/jobs}
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
[ -n "${SLURM_JOB_GPUS:-}${CUDA_VISIBLE_DEVICES:-}${SLURM_SHARDS_ON_NODE:-}" ] || exit 0
umask 022
{
    [ -d "$directory" ] || mkdir -p "$directory"
    fresh=$directory/.$SLURM_JOB_ID.$$
    printf 'gpus=%s\nvisible=%s\n' "${SLURM_JOB_GPUS:-}" "${CUDA_VISIBLE_DEVICES:-}" >"$fresh" &&
        mv -f "$fresh" "$directory/$SLURM_JOB_ID" || rm -f "$fresh"
} 2>/dev/null
exit 0
