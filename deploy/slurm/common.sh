# Functions of prolog.sh, health-check.sh and epilog.sh, which read this file first. At its end it reads the settings.
script=${0##*/} script=${script%.sh}
topoflight=/opt/topoflight/bin/topoflight options=() seconds=8 # defaults of the settings

# Logs a text. The settings may define another log: $1 is the script, $2 the text.
log() { logger -t "topoflight-$1" -p daemon.warning -- "$2"; }

# Checks this node, and sets findings and code. The output goes to a file, because a process that hangs in a driver cannot
# be killed and would keep a pipe open.
check_node() {
  local file
  file=$(mktemp -p /run 2> /dev/null || mktemp 2> /dev/null) || file=/dev/null # /tmp may be full
  { # bash itself writes "Killed" if the time ends with SIGKILL
    timeout --kill-after=1 "$seconds" "$topoflight" preflight -q -o reason --timeout "$((seconds - 3))" "${options[@]}" \
      > "$file" 2>&1
  } 2> /dev/null
  code=$?
  findings=$(cat "$file")
  case $code in 124 | 137) findings="the check did not end within $seconds s${findings:+: $findings}" ;; esac
  [ "$file" = /dev/null ] || rm -f "$file"
}

# Broken settings are logged with file and line, and never drain a node.
settings=$(dirname "$0")/settings
if ! errors=$(bash -n "$settings" 2>&1); then
  log "$script" "nothing was checked, because the settings cannot be read: $errors"
  exit 0
fi
grep -q $'\r$' "$settings" && log "$script" "$settings has Windows line ends: remove them with sed -i 's/\r\$//' $settings"
# shellcheck source=settings
errors=$(. "$settings" 2>&1 > /dev/null)
[ -z "$errors" ] || log "$script" "a line of the settings failed: $errors"
shell_options=$(set +o) # `set -e` and `set -u` of the settings would end this script at its next command that fails
trap 'set +e
  log "$script" "nothing was checked, because a line of $settings ends the script: exit, or an unset variable after set -u"
  exit 0' EXIT
# shellcheck source=settings
. "$settings" 2> /dev/null
trap - EXIT
eval "$shell_options"
if ! [[ $seconds =~ ^[1-9][0-9]{0,3}$ ]] || [ "$seconds" -lt 4 ]; then
  log "$script" "$settings: seconds=$seconds must be a whole number from 4 to 9999; 8 is used"
  seconds=8
fi
