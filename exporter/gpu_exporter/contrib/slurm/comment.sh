#!/bin/sh
# gpu-exporter: writes the line about the use of an ended job's GPUs into its AdminComment, which sacct shows.
#
# Run it every 5 minutes on slurmctld's host as SlurmUser, an Administrator of slurmdbd (docs/jobs.md). The flags of
# `gpu-exporter job` are in /etc/gpu-exporter/job.environment, as for mail.sh. It never replaces a text, so a mark of the
# reconciler and the texts of other programs remain. It sends slurmctld nothing. If a report fails, or has no measurement,
# later runs of this script try again.
# shellcheck disable=SC1091,SC2086 # a file of the site, with several flags in one variable
settled=180  # s after a job's end: its last scrape is in Prometheus, and a requeued job waits again (121 s by default)
window=1800  # s after a job's end; at most six runs of this script ask for its report
enough=240   # s: then no further report begins. One at a time, the longest jobs first: not each of many short ones gets it
[ ! -r /etc/gpu-exporter/job.environment ] || . /etc/gpu-exporter/job.environment
exec 9<"$0"
flock -n 9 || exit 0 # the last run still works
export SLURM_TIME_FORMAT=%s
now=$(date +%s)
ask() { timeout 60 sacct --allocations --noheader --parsable2 --local "$@" </dev/null; }
ended=$(ask --allusers --starttime="now-$window" --format=JobID,ElapsedRaw,End,AllocTRES,AdminComment) || exit 1
printf '%s\n' "$ended" | awk -F '|' -v from="$((now - window))" -v to="$((now - settled))" '
    NF == 5 && $1 ~ /^[0-9]+([_+][0-9]+)?$/ && $3 ~ /^[0-9]+$/ && $3 >= from && $3 <= to && $4 ~ /gres\/gpu/ && $5 == "" {
        print $2, $1, $3
    }' | sort -rn | while read -r _ job end; do
    [ "$(date +%s)" -lt "$((now + enough))" ] || break
    # The last --format counts: the flags may have another one, for mails.
    line=$(timeout 30 gpu-exporter job "$job" ${GPU_EXPORTER_JOB_FLAGS:-} --format=line </dev/null) || continue
    # By the id that sacct prints: that of an array's last task (raw), of the array and of all its tasks is the same.
    # sacctmgr changes the last run of a job. It must still be the one that ended, and have no text.
    [ "$(ask --jobs="$job" --format=End,AdminComment)" = "$end|" ] || continue
    timeout 60 sacctmgr -i modify job where jobid="$job" set AdminComment="$line" </dev/null >/dev/null
done
