#!/bin/bash
# Epilog of slurmd: logs what a job has left on this node to the system log. It only reads, and never drains the node.
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh" || {
  logger -t topoflight-epilog -p daemon.warning -- "nothing was checked: $(dirname "$0")/common.sh cannot be read"
  exit 0
}
note() { log epilog "job $SLURM_JOB_ID left $1"; }
of_job() { tr '\0' '\n' 2>/dev/null < "/proc/$1/environ" | grep -qx "SLURM_JOB_ID=$SLURM_JOB_ID"; }
processes=()
for folder in /proc/[0-9]*; do
  process=${folder#/proc/}
  # the steps' own daemons and this script have the job's id, too
  [ "$process" = "$$" ] || [ "$process" = "$PPID" ] && continue
  of_job "$process" && processes+=("$process")
done
[ ${#processes[@]} -eq 0 ] || sleep 2 # a process that Slurm has just signalled needs a moment to end
for process in "${processes[@]}"; do
  of_job "$process" && name=$(cat "/proc/$process/comm" 2>/dev/null) || continue
  case $name in slurmstepd | slurmd | tr | grep | epilog.sh) continue ;; esac
  note "process $process ($name) of user $(stat -c %U "/proc/$process" 2>/dev/null)"
done
# Shared memory of NCCL and PyTorch. An earlier job, or another job of the same user that still runs, may have made a file.
find /dev/shm -maxdepth 1 -type f -user "$SLURM_JOB_UID" \( -name 'nccl-*' -o -name 'torch_*' \) \
  -printf '%p (%s bytes, written %TY-%Tm-%TdT%TH:%TM)\n' 2>/dev/null |
  while read -r file; do log epilog "after job $SLURM_JOB_ID this node has shared memory $file"; done
exit 0
