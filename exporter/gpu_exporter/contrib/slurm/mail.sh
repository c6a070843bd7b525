#!/bin/sh
# gpu-exporter: adds one line about the use of the job's GPUs to Slurm's mails about the end of a job.
#
# In slurm.conf: MailProg=/etc/slurm/gpu-mail.sh. slurmctld runs it as SlurmUser, as `gpu-mail.sh -s SUBJECT ADDRESS`, and
# does not wait for it. Write flags of `gpu-exporter job` into /etc/gpu-exporter/job.environment:
# GPU_EXPORTER_JOB_FLAGS=--source.prometheus=http://prometheus:9090. If the report takes longer than 30 s, or fails, the mail
# is sent without the line. In the subject, the job's id comes before the name, which the job's owner chooses.
mail=${GPU_EXPORTER_MAIL:-mail} # the program that sent the mails before
[ ! -r /etc/gpu-exporter/job.environment ] || . /etc/gpu-exporter/job.environment
id=$(printf '%s\n' "${2:-}" | sed -n '1s/^Slurm [A-Za-z ]*Job_id=\([0-9][0-9]*\(_[0-9][0-9]*\)\{0,1\}\)[^0-9].*/\1/p')
case $id,${2:-} in
,* | *' Began' | *' Began, '* | *' Queued time '*) exec "$mail" "$@" ;;
esac
line=$(timeout 30 gpu-exporter job "$id" --format=line ${GPU_EXPORTER_JOB_FLAGS:-} 2>/dev/null)
{
    cat
    [ -z "$line" ] || printf '%s\n' "$line"
} | "$mail" "$@"
