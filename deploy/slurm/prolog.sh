#!/bin/bash
# Prolog of slurmd: checks this node before a job starts on it. It only reads, and calls no Slurm command.
# If a check fails, the exit code is 1: Slurm drains the node and queues the job again. The system log has the finding.
# A check that could not be made, or that took too long, does not stop the job.
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh" || {
  logger -t topoflight-prolog -p daemon.warning -- "nothing was checked: $(dirname "$0")/common.sh cannot be read"
  exit 0
}
export SLURM_SCRIPT_CONTEXT=${SLURM_SCRIPT_CONTEXT:-prolog_slurmd}
check_node
case $code in
  0 | 4) exit 0 ;;
  3) log prolog "job ${SLURM_JOB_ID:-?} is not started: $findings"
     exit 1 ;;
  *) log prolog "node not checked (exit code $code): $findings"
     exit 0 ;;
esac
