# A host, and a pod that is a process in a namespace of its own, made before the host's script runs so that devices can be
# moved there: ip link set net1 netns $POD. Prints what the probe sees, in the pod where it has a script.
set -e
mount --make-rprivate / && mount -t sysfs sysfs /sys
ip link set lo up
unshare -n -m sleep 120 & POD=$!
trap 'kill $POD' EXIT
until [ "$(readlink /proc/$POD/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
eval "$HOST_SCRIPT"
if [ -n "$POD_SCRIPT" ]; then
  nsenter -t $POD -n -m bash -e -c '
    mount -t sysfs sysfs /sys; ip link set lo up; eval "$POD_SCRIPT"; "$PYTHON" -c "$LOOK"'
else
  "$PYTHON" -c "$LOOK"
fi
