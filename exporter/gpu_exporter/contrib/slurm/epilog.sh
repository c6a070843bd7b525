#!/bin/sh
# gpu-exporter: records that a job has returned its GPUs. In slurm.conf: Epilog=/etc/slurm/epilog.d/*
#
# Install it as zzz-gpu-exporter.sh: Slurm runs epilogs from the last name to the first, and none after one that failed.
# Runs as root at the end of each job. Always ends with status 0, since an epilog that fails drains the node. It keeps the
# files of the last 256 jobs, each with the time of the job's end, so that the exporter counts jobs that end between two
# polls, or while it does not run. The names have increasing numbers, which show how many older files were removed.
umask 022 # the exporter ignores files that others may write to
directory=${GPU_EXPORTER_JOB_FILES:-/run/gpu-exporter/jobs}
training=${GPU_EXPORTER_TRAINING_FILES:-} # as in the prolog
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
file=$directory/$SLURM_JOB_ID
{
    case $training in /*) rm -rf "${training:?}/$SLURM_JOB_ID" ;; esac # follows no link
    [ -f "$file" ] || exit 0
    [ -d "$directory/.ended" ] || mkdir "$directory/.ended"
    last=1000000000 # each number has ten digits, so the order of the names is the order of the ends
    set -- "$directory"/.ended/[1-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9].*
    [ -e "$1" ] || shift
    for last; do :; done
    last=${last##*/}
    while [ $# -ge 256 ]; do
        rm -f "$1"
        shift
    done
    printf 'end=%s\n' "$(date +%s)" >>"$file" &&
        mv -f "$file" "$directory/.ended/$((${last%%.*} + 1)).$SLURM_JOB_ID" || rm -f "$file"
} 2>/dev/null
exit 0
