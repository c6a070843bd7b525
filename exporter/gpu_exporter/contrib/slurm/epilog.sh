#!/bin/sh
# gpu-exporter: the job has given its GPUs back. In slurm.conf: Epilog=/etc/slurm/epilog.d/gpu-exporter.sh
# Runs as root at the end of each job; ends with 0 whatever happens, since an epilog that fails drains the node.
directory=${GPU_EXPORTER_JOB_FILES:-/run/gpu-exporter/jobs}
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
rm -f "$directory/$SLURM_JOB_ID" 2>/dev/null
exit 0
