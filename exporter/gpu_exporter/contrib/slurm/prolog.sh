#!/bin/sh
# gpu-exporter: writes which GPUs of this node a job has, and the job's owner, so that the exporter need not ask slurmctld.
#
# In slurm.conf: Prolog=/etc/slurm/prolog.d/* and PrologFlags=Alloc (or Contain, which includes Alloc, and shows the
# exporter jobs that have no step). Install it as zzz-gpu-exporter.sh, so that Slurm runs it first. Runs as root at the
# start of each job. Always ends with status 0, since a prolog that fails drains the node. Starts only mkdir, date, mv, stat
# and install, and sends no request. Every value comes from slurmd: variables that a job exports are not in this
# environment.
directory=${GPU_EXPORTER_JOB_FILES:-/run/gpu-exporter/jobs}
# /run/gpu-exporter/training gives each job a folder in which it may describe its training; empty: none. Mount a file
# system of its own there (docs/torch.md).
training=${GPU_EXPORTER_TRAINING_FILES:-}
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
[ -n "${SLURM_JOB_GPUS:-}${CUDA_VISIBLE_DEVICES:-}${SLURM_SHARDS_ON_NODE:-}" ] || exit 0
umask 022 # 027 if users must not see whose jobs run here; then the exporter has to run as root or in this group
# A value with any other character is not written; then the exporter asks slurmctld.
say() { case $2 in '' | *[!A-Za-z0-9._@+-]*) ;; *) printf '%s=%s\n' "$1" "$2" ;; esac }
{
    [ -d "$directory" ] || mkdir -p "$directory"
    fresh=$directory/.$SLURM_JOB_ID.$$
    { # joined by &&: a file that lacks a line, since the disk was full meanwhile, would name fewer GPUs
        printf 'job=%s\ngpus=%s\nvisible=%s\n' "$SLURM_JOB_ID" "${SLURM_JOB_GPUS:-}" "${CUDA_VISIBLE_DEVICES:-}" &&
            # Slurm sets this variable only for jobs with MPS. Jobs with shards look like jobs with whole GPUs here.
            printf 'mps=%s\n' "${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:+yes}" &&
            say user "${SLURM_JOB_USER:-}" &&
            say uid "${SLURM_JOB_UID:-}" &&
            say account "${SLURM_JOB_ACCOUNT:-}" &&
            say partition "${SLURM_JOB_PARTITION:-}" &&
            say cluster "${SLURM_CLUSTER_NAME:-}" &&
            say restarts "${SLURM_JOB_RESTART_COUNT:-}" &&
            say start "${SLURM_JOB_START_TIME:-}" && # not before Slurm 23.02
            say nodes "${SLURM_JOB_NUM_NODES:-}" &&
            say began "$(date +%s)"
    } >"$fresh" && mv -f "$fresh" "$directory/$SLURM_JOB_ID" || rm -f "$fresh"
    case $training${SLURM_JOB_UID:-} in
    /*[0-9])
        [ -d "$training" ] || mkdir -p "$training"
        # On the tmpfs of /run itself, a user could take the last bytes from slurmd and systemd.
        case $(stat -fc %T "$training"),$(stat -c %d "$training") in "tmpfs,$(stat -c %d /run)") exit 0 ;; esac
        install -d -m 0755 -o "$SLURM_JOB_UID" "$training/$SLURM_JOB_ID"
        ;;
    esac
} 2>/dev/null
exit 0
