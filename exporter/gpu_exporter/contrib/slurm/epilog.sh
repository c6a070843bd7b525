#!/bin/sh
# gpu-exporter: records that a job has returned its GPUs. In slurm.conf: Epilog=/etc/slurm/epilog.d/gpu-exporter.sh
# Runs as root at the end of each job. Always ends with status 0, since an epilog that fails drains the node. It keeps the
# files of the last 256 jobs, each with the time of the job's end, so that the exporter detects jobs that are shorter than
# the time between two polls.
directory=${GPU_EXPORTER_JOB_FILES:-/run/gpu-exporter/jobs}
training=${GPU_EXPORTER_TRAINING_FILES:-} # as in the prolog
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
file=$directory/$SLURM_JOB_ID
{
    case $training in /*) rm -rf "${training:?}/$SLURM_JOB_ID" ;; esac # follows no link
    [ -f "$file" ] || exit 0
    [ -d "$directory/.ended" ] || mkdir "$directory/.ended"
    printf 'end=%s\n' "$(date +%s)" >>"$file" && mv -f "$file" "$directory/.ended/$((SLURM_JOB_ID % 256))" || rm -f "$file"
} 2>/dev/null
exit 0
