#!/bin/sh
# gpu-exporter: the job has given its GPUs back. In slurm.conf: Epilog=/etc/slurm/epilog.d/gpu-exporter.sh
# Runs as root at the end of each job; ends with 0 whatever happens, since an epilog that fails drains the node. The file
# stays for a while among the last 256, with the time of the end, so that the exporter learns of jobs that are shorter
# than its polls.
directory=${GPU_EXPORTER_JOB_FILES:-/run/gpu-exporter/jobs}
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
file=$directory/$SLURM_JOB_ID
{
    [ -f "$file" ] || exit 0
    [ -d "$directory/.ended" ] || mkdir "$directory/.ended"
    printf 'end=%s\n' "$(date +%s)" >>"$file"
    mv -f "$file" "$directory/.ended/$((SLURM_JOB_ID % 256))" || rm -f "$file"
} 2>/dev/null
exit 0
