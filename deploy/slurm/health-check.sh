#!/bin/bash
# HealthCheckProgram of slurmd: drains this node with the finding as the reason, and resumes it when the check passes.
# It resumes only a node whose reason begins with "topoflight: ", and replaces no other reason than "Prolog error",
# which Slurm sets when prolog.sh has failed.
# shellcheck source=settings
. "$(dirname "$0")/settings"
node=${SLURMD_NODENAME:-$(hostname -s)}
export SLURMD_NODENAME=$node SLURM_SCRIPT_CONTEXT=health_check
findings=$(timeout --kill-after=1 "$seconds" "$topoflight" preflight -q -o reason "${options[@]}" 2>&1)
code=$?
current=$(timeout 10 sinfo -h -N -n "$node" -o '%T|%E') || exit 0 # the controller does not answer: the next check tries again
current=${current%%$'\n'*}
state=${current%%|*} reason=${current#*|}
case $code in
  3) new_reason="topoflight: ${findings%%$'\n'*}"
     case $reason in
       "$new_reason") ;;
       none | "Prolog error" | "topoflight: "*)
         timeout 10 scontrol update "NodeName=$node" State=DRAIN "Reason=$new_reason" ;;
     esac ;;
  0 | 4) case $state:$reason in
       drain*:"topoflight: "*) timeout 10 scontrol update "NodeName=$node" State=RESUME ;;
     esac ;;
  *) log health-check "node not checked (exit code $code): $findings" ;;
esac
exit 0
