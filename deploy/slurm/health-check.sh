#!/bin/bash
# HealthCheckProgram of slurmd: drains this node with the finding as the reason, and resumes it when the check passes.
# It resumes only a node whose reason begins with "topoflight: ". The reason of a node that is drained or down is replaced
# only if it is "Prolog error", which Slurm sets when prolog.sh has failed. The reason of a node in service is only a note
# and is replaced. The script ends within 10 seconds, whether the drivers and the controller answer or not.
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh" || {
  logger -t topoflight-health-check -p daemon.warning -- "nothing was checked: $(dirname "$0")/common.sh cannot be read"
  exit 0
}
node=${SLURMD_NODENAME:-$(hostname -s)}
export SLURMD_NODENAME=$node SLURM_SCRIPT_CONTEXT=health_check
slurm() { # one command of Slurm, within the remaining time
  timeout "$((SECONDS < seconds ? seconds + 1 - SECONDS : 1))" "$@" && return
  log health-check "node not changed: $1 failed or did not answer (exit code $?)"
  return 1
}
check_node
case $code in
  0 | 3 | 4) ;;
  *) log health-check "node not checked (exit code $code): $findings"
     exit 0 ;;
esac
current=$(slurm sinfo -h -N -n "$node" -o '%T|%E') || exit 0
current=${current%%$'\n'*}
state=${current%%|*} reason=${current#*|}
if [ "$code" -eq 3 ]; then
  new_reason="topoflight: ${findings%%$'\n'*}"
  case $state:$reason in
    drain*:"$new_reason") ;;
    *:none | *:"Prolog error" | *:"topoflight: "* | idle*:* | mixed*:* | alloc*:* | comp*:* | planned*:*)
      slurm scontrol update "NodeName=$node" State=DRAIN "Reason=$new_reason" ;;
  esac
else
  case $state:$reason in
    drain*:"topoflight: "*) slurm scontrol update "NodeName=$node" State=RESUME ;;
  esac
fi
exit 0
